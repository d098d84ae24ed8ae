"""The `cpu` executor: a program lowered to the C++ core once, then one call without the GIL per step.

Row results are the same bits whatever the company, chunking, page size, threads and instruction set. Knows
nothing of kernels' insides.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.cpu.lower import Lowering, multiply_adds
from engine.cpu.pack_cache import PackCache
from engine.cpu.packed import packed
from engine.cpu.packing import Progress
from engine.cpu.shelf import Shelf
from engine.describe import describe
from engine.errors import EngineError
from engine.executor import (
    Arena,
    Slice,
    SliceMeta,
    StepResult,
    check_arena,
    sort_out,
)
from engine.fuse import without_unused
from engine.models import build
from engine.paging import page_geometry
from engine.weights.source import ModelSource
from kernels.cpu import load

ROWS_AT_ONCE = 512
"""Longer steps run in parts of this many rows: it bounds the memory for activations."""
_REVISION = 4
"""To be raised whenever any bit of a result or of a page changes."""

Numbers = NDArray[np.int32]


class CpuExecutor:
    """Implements `engine.executor.Executor`. Not for use from two threads at a time, except `abort`."""

    def __init__(
        self,
        model: ModelSource,
        *,
        threads: int,
        page_tokens: int,
        kv_dtype: str,
        logits: bool = True,
        isa: str | None = None,
        rows_at_once: int = ROWS_AT_ONCE,
        cpus: Sequence[int] = (),
        content: bytes | None = None,
        packs: PackCache | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """`content` is the digest of the weights, where it is known already."""
        program, hyper = build(model, logits=logits)
        program = without_unused(program)
        layout = page_geometry(program.caches, page_tokens=page_tokens, dtype=kv_dtype, turned=True)
        core = load()
        chosen = os.environ.get("KVMESH_CPU_ISA", "") if isa is None else isa
        try:
            self._engine = core.Engine(threads, chosen, list(cpus))
        except ValueError as error:
            raise EngineError(f"the cpu executor cannot start: {error}") from error
        content = model.weights.digest() if content is None else content
        pack = packed(
            core,
            model,
            program,
            hyper.context_length,
            content,
            packs,
            threads=threads,
            progress=progress,
        )
        shelf = Shelf(self._engine, pack)
        lowering = Lowering(self._engine, shelf, program, layout, hyper.context_length)
        lowering.run()
        self.workspace_bytes = self._engine.plan(rows_at_once, hyper.context_length)
        self.multiply_adds = multiply_adds(program.operations)
        self._padding = model.padding_ids
        self._logit_cap = lowering.logit_cap
        self._has_logits = program.result is not None
        self._pages = 0
        turns = blake2b("".join(shelf.rope_digests).encode(), digest_size=8)
        self.info = describe(
            model,
            program,
            layout,
            kv_dtype=kv_dtype,
            context_length=hyper.context_length,
            numerics_id=f"cpu/{_REVISION} turns={turns.hexdigest()}",
            weights_digest=content,
            weights_bytes=shelf.nbytes,
        )

    @property
    def isa(self) -> str:
        """The instruction set that is used."""
        return self._engine.isa

    def bind(self, arena: Arena, pages: int, page_bytes: int) -> None:
        view = check_arena(arena, pages, page_bytes, self.info.layout)
        memory = np.frombuffer(view, np.uint8)
        self._engine.bind(memory, pages, page_bytes, self.info.layout.page_tokens, self.info.kv_dtype)
        self._pages = pages

    def draft(self, meta: SliceMeta) -> list[int]:
        return []

    def abort(self) -> None:
        """Makes the step that runs end with an EngineError at its next operation. From any thread."""
        self._engine.abort()

    def step(self, batch: Sequence[Slice]) -> list[StepResult]:
        if not self._pages:
            raise EngineError("step before bind: there is no pool to work in")
        results, good = sort_out(batch, self.info, self._pages, has_logits=self._has_logits)
        if not good:
            return results
        logits = self._run([slice_ for _, slice_ in good])
        row = 0
        for index, slice_ in good:
            if slice_.logits:
                results[index] = logits[row : row + slice_.logits]
                row += slice_.logits
        return results

    def _run(self, batch: Sequence[Slice]) -> NDArray[np.float32]:
        tables = [
            np.asarray(slice_.pages, np.int32)[
                : self.info.layout.pages_for(slice_.start + len(slice_.tokens))
            ]
            for slice_ in batch
        ]
        rows = sum(slice_.logits for slice_ in batch)
        logits = np.empty((rows, self.info.vocab_size), np.float32)
        try:
            self._engine.step(
                np.concatenate([np.asarray(slice_.tokens, np.int32) for slice_ in batch]),
                _numbers([slice_.start for slice_ in batch]),
                _numbers([len(slice_.tokens) for slice_ in batch]),
                _numbers([slice_.logits for slice_ in batch]),
                _numbers(np.cumsum([0, *map(len, tables)])),
                np.concatenate(tables),
                logits,
            )
        except ValueError as error:
            raise EngineError(f"the step failed: {error}") from error
        if self._logit_cap:
            logits /= np.float32(self._logit_cap)
            np.tanh(logits, out=logits)
            logits *= np.float32(self._logit_cap)
        first, end = self._padding
        if end > first:
            # Finite, so that it counts as a number, and far below any other logit.
            logits[:, first:end] = -1e30
        return logits


def _numbers(values: Sequence[int] | NDArray[np.int64]) -> Numbers:
    return np.asarray(values, np.int32)
