"""The seam between the workers and a model that runs: batches in, logits out.

A ragged batch is the only shape that a step knows: for each sequence a `Slice` with its new tokens, their
first position, its page table, and how many of its last rows need logits. Prefill is a step with long
slices, decode with slices of one token, speculation with slices of a few.

A row's result does not depend on its company: the same row gives the same bits whatever the other slices,
the chunking, the page size. Keys and values are always read back from pages.

Knows nothing of requests, sampling, or where pages come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.paging import PageGeometry

Logits = NDArray[np.float32]
Arena = mmap | memoryview | bytearray


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded model is. Pages may be shared only where every field that shapes their bytes agrees."""

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    hidden_size: int
    layers: int
    layout: PageGeometry
    kv_dtype: str
    rope: str
    """Canonical text of every rope parameter."""
    weights_digest: bytes
    """BLAKE2b-128 of the content of the weights, not of their name."""
    numerics_id: str
    """Executors whose results may differ in any bit have different ones."""
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class SliceMeta:
    """What only a scripted model looks at."""

    prompt: Sequence[int]
    """The original prompt: tokens that were generated before (by a worker that died) are not in it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    generated: int = 0
    """Tokens generated so far, by whatever worker."""


@dataclass(slots=True)
class Slice:
    """One sequence's part of a step."""

    tokens: Sequence[int]
    start: int
    """Position of tokens[0]. Everything before lies in the pages already."""
    pages: Sequence[int]
    """Page of each block, at least ceil((start + len(tokens)) / P) of them."""
    logits: int = 0
    """How many of the last rows need logits."""
    meta: SliceMeta | None = None


@dataclass(frozen=True, slots=True)
class SliceFailure:
    """Stands in place of logits where one slice failed; its neighbours are untouched."""

    message: str


StepResult = Logits | SliceFailure | None


class Executor(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    def bind(self, arena: Arena, pages: int, page_bytes: int) -> None:
        """Gives the pool that page indices point into. Raises EngineError if it does not fit the layout."""

    def step(self, batch: Sequence[Slice]) -> list[StepResult]:
        """Runs one step; blocks. For each slice float32 [slice.logits, vocab_size], None, or a failure."""

    def draft(self, meta: SliceMeta) -> list[int]:
        """Tokens to feed after the last one in this step, to be verified by its logits."""


def sort_out(
    batch: Sequence[Slice], info: EngineInfo, pages: int, *, has_logits: bool
) -> tuple[list[StepResult], list[tuple[int, Slice]]]:
    """What stands for each slice before the step, and those that can run, with their place in the batch."""
    results: list[StepResult] = [None] * len(batch)
    good: list[tuple[int, Slice]] = []
    for index, slice_ in enumerate(batch):
        problem = check_slice(slice_, info, pages)
        if problem is None and slice_.logits and not has_logits:
            problem = "this worker was loaded without the output matrix"
        if problem is None:
            good.append((index, slice_))
        else:
            results[index] = SliceFailure(problem)
    return results, good


def check_slice(slice_: Slice, info: EngineInfo, pages: int) -> str | None:
    """Why this slice cannot be run, or None."""
    count = len(slice_.tokens)
    if count == 0:
        return "the slice has no tokens"
    if not 0 <= slice_.logits <= count:
        return f"logits are asked for {slice_.logits} of {count} rows"
    end = slice_.start + count
    if slice_.start < 0 or end > info.context_length:
        return f"positions {slice_.start} to {end - 1} leave the context of {info.context_length} tokens"
    needed = info.layout.pages_for(end)
    if len(slice_.pages) < needed:
        return f"{len(slice_.pages)} pages are given where {needed} are needed"
    if min(slice_.pages[:needed]) < 0 or max(slice_.pages[:needed]) >= pages:
        return f"a page index is outside the pool of {pages} pages"
    if min(slice_.tokens) < 0 or max(slice_.tokens) >= info.vocab_size:
        return f"a token id is outside the vocabulary of {info.vocab_size}"
    return None


def check_arena(arena: Arena, pages: int, page_bytes: int, layout: PageGeometry) -> memoryview:
    """The arena as writable bytes. Raises EngineError if pages do not fit in it or in the layout."""
    view = memoryview(arena).cast("B")
    if view.readonly:
        raise EngineError("the arena is read-only")
    if page_bytes < layout.page_bytes:
        raise EngineError(f"pages of {page_bytes} bytes are smaller than the layout's {layout.page_bytes}")
    if pages < 1 or pages * page_bytes > len(view):
        raise EngineError(f"{pages} pages of {page_bytes} bytes do not fit in an arena of {len(view)} bytes")
    return view
