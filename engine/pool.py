"""The pool of pages as torch sees it: views of the arena, one per plane. Knows nothing of who owns a page."""

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.paging import ITEM_BYTES, PageGeometry, Plane
from kernels.reference.attention import Pool, Stored
from kernels.reference.elementwise import eight_bits

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8}

_WHICH = {"k": 0, "v": 1}
"""Of the two scales of a token and head."""


class PagePool:
    """Views of an arena of `pages` pages that lie `page_bytes` apart."""

    def __init__(self, arena: memoryview, pages: int, page_bytes: int, layout: PageGeometry) -> None:
        self.pages = pages
        self.page_tokens = layout.page_tokens
        self._page_bytes = page_bytes
        self._memory: dict[str, Tensor] = {}
        for dtype in {plane.dtype for plane in layout.planes}:
            item = ITEM_BYTES[dtype]
            if page_bytes % item:
                raise EngineError(f"pages of {page_bytes} bytes hold no whole number of {dtype} numbers")
            count = pages * (page_bytes // item)
            self._memory[dtype] = torch.frombuffer(arena, dtype=_DTYPES[dtype], count=count)
        self._write = {(plane.layer, plane.kind): self._by_slot(plane) for plane in layout.planes}
        numbers = [plane for plane in layout.planes if plane.kind != "scale"]
        scales = {plane.layer: plane for plane in layout.planes if plane.kind == "scale"}
        self._run_tokens = {
            (plane.heads, plane.dim): self._run(plane, scales.get(plane.layer)) for plane in numbers
        }
        self._read = {
            (plane.layer, plane.kind): self._stored(plane, scales.get(plane.layer)) for plane in numbers
        }
        self._page_runs = {
            (plane.heads, plane.dim): self._stride(plane) // (self._run_of(plane) * plane.dim)
            for plane in numbers
        }

    def write(self, layer: int, kind: str, pages: Tensor, slots: Tensor, values: Tensor) -> None:
        """values [rows, heads, dim] of new tokens, each into its page and slot."""
        view = self._write[layer, kind]
        if view.dtype == torch.int8:
            values, scales = eight_bits(values)
            self._write[layer, "scale"][pages, slots, :, _WHICH[kind]] = scales
        view[pages, slots] = values if values.dtype == view.dtype else values.to(view.dtype)

    def runs(self, layer: int, kind: str) -> Stored:
        """The plane as runs of one head's consecutive tokens: [runs, run tokens * dim]"""
        return self._read[layer, kind]

    def shape(self, heads: int, dim: int) -> Pool:
        """How planes of this shape lie, for `attention.plan`."""
        return Pool(self.page_tokens, heads, self._run_tokens[heads, dim], self._page_runs[heads, dim])

    def _by_slot(self, plane: Plane) -> Tensor:
        tokens = self.page_tokens
        return self._memory[plane.dtype].as_strided(
            (self.pages, tokens, plane.heads, plane.dim),
            (self._stride(plane), plane.dim, tokens * plane.dim, 1),
            plane.offset // ITEM_BYTES[plane.dtype],
        )

    def _stride(self, plane: Plane) -> int:
        """Numbers from one page to the next."""
        return self._page_bytes // ITEM_BYTES[plane.dtype]

    def _run(self, plane: Plane, scale: Plane | None) -> int:
        """Tokens read at once: all of a page's where pages lie a whole number of such runs apart."""
        parts = [plane] if scale is None else [plane, scale]
        for tokens in (self.page_tokens, 1):
            if all(self._stride(part) % (tokens * part.dim) == 0 for part in parts):
                return tokens
        raise EngineError(f"pages of {self._page_bytes} bytes are no whole number of heads of {plane.dim}")

    def _run_of(self, plane: Plane) -> int:
        return self._run_tokens[plane.heads, plane.dim]

    def _stored(self, plane: Plane, scale: Plane | None) -> Stored:
        run = self._run_of(plane)
        numbers = self._by_run(plane, run)
        if scale is None:
            return Stored(numbers)
        strides = tuple(self._stride(part) // (run * part.dim) for part in (plane, scale))
        return Stored(numbers, self._by_run(scale, run), _WHICH[plane.kind], strides[0], strides[1])

    def _by_run(self, plane: Plane, run: int) -> Tensor:
        memory, width, offset = (
            self._memory[plane.dtype],
            run * plane.dim,
            plane.offset // ITEM_BYTES[plane.dtype],
        )
        return memory.as_strided(((len(memory) - offset) // width, width), (width, 1), offset)
