"""The pool of pages as torch sees it: views of the arena, one per plane. Knows nothing of who owns a page."""

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.paging import ITEM_BYTES, PageGeometry, Plane
from kernels.reference.attention import Pool

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class PagePool:
    """Views of an arena of `pages` pages that lie `page_bytes` apart."""

    def __init__(self, arena: memoryview, pages: int, page_bytes: int, layout: PageGeometry) -> None:
        self.pages = pages
        self.page_tokens = layout.page_tokens
        dtype = layout.planes[0].dtype
        item = ITEM_BYTES[dtype]
        if page_bytes % item:
            raise EngineError(f"pages of {page_bytes} bytes hold no whole number of {dtype} numbers")
        self._stride = page_bytes // item
        self._memory = torch.frombuffer(arena, dtype=_DTYPES[dtype], count=pages * self._stride)
        self._planes = {(plane.layer, plane.kind): plane for plane in layout.planes}
        self._item = item
        self._write = {key: self._by_slot(plane) for key, plane in self._planes.items()}
        self._run_tokens = {(plane.heads, plane.dim): self._run(plane) for plane in layout.planes}
        self._read = {key: self._by_run(plane) for key, plane in self._planes.items()}

    def write(self, layer: int, kind: str, pages: Tensor, slots: Tensor, values: Tensor) -> None:
        """values [rows, heads, dim] of new tokens, each into its page and slot."""
        view = self._write[layer, kind]
        view[pages, slots] = values if values.dtype == view.dtype else values.to(view.dtype)

    def runs(self, layer: int, kind: str) -> Tensor:
        """The plane as runs of one head's consecutive tokens: [runs, run tokens * dim]"""
        return self._read[layer, kind]

    def shape(self, heads: int, dim: int) -> Pool:
        """How planes of this shape lie, for `attention.plan`."""
        run = self._run_tokens[heads, dim]
        return Pool(self.page_tokens, heads, run, self._stride // (run * dim))

    def _by_slot(self, plane: Plane) -> Tensor:
        tokens = self.page_tokens
        return self._memory.as_strided(
            (self.pages, tokens, plane.heads, plane.dim),
            (self._stride, plane.dim, tokens * plane.dim, 1),
            plane.offset // self._item,
        )

    def _run(self, plane: Plane) -> int:
        """Tokens read at once: all of a page's where pages lie a whole number of such runs apart."""
        for tokens in (self.page_tokens, 1):
            if self._stride % (tokens * plane.dim) == 0:
                return tokens
        raise EngineError(
            f"pages of {self._stride * self._item} bytes are no whole number of heads of {plane.dim}"
        )

    def _by_run(self, plane: Plane) -> Tensor:
        width = self._run_tokens[plane.heads, plane.dim] * plane.dim
        offset = plane.offset // self._item
        return self._memory.as_strided(((len(self._memory) - offset) // width, width), (width, 1), offset)
