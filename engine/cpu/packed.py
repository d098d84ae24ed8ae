"""The pack of a model: mapped from where packs are kept, or made in memory.

Knows nothing of how a program runs.
"""

import mmap
import sys
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

import engine
from engine.cpu.lower import Lowering
from engine.cpu.pack import ALIGNMENT, Bytes, Index, Pack
from engine.cpu.pack_cache import PackCache
from engine.cpu.packing import Progress, Sink, pack
from engine.cpu.shelf import WishList
from engine.fuse import without_unused
from engine.models import build
from engine.paging import page_geometry
from engine.program import Program
from engine.weights.source import ModelSource
from kernels.cpu import Core, revision

# What is mapped is an upper bound. Python has no name for it.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Recipe:
    """How the pack for some programs of a model is made."""

    def __init__(
        self,
        core: Core,
        model: ModelSource,
        programs: list[Program],
        context: int,
        threads: int,
        tell: Progress,
    ) -> None:
        never_run = core.Engine(1, "")
        wishes = WishList(core, never_run, model.weights)
        for program in programs:
            # Any pages will do.
            layout = page_geometry(program.caches, page_tokens=1, dtype="f32")
            Lowering(never_run, wishes, program, layout, context).run()
        self.bytes_at_most = wishes.bytes_at_most
        self._core = core
        self._model = model
        self._wants = wishes.wants
        self._threads = threads
        self._tell = tell

    def make(self, sink: Sink) -> Index:
        """Raises WeightError where a number is not finite."""
        return pack(
            self._core, self._model.weights, self._wants, sink, threads=self._threads, progress=self._tell
        )


def packed(
    core: Core,
    model: ModelSource,
    program: Program,
    context: int,
    content: bytes,
    kept: PackCache | None,
    *,
    threads: int,
    progress: Progress,
) -> Pack:
    """A pack that has what `program` needs; `content` is the digest of the weights.

    One that is kept serves workers with and without logits.
    """

    def recipe(programs: list[Program]) -> Recipe:
        return Recipe(core, model, programs, context, threads, progress)

    if kept is not None:
        found = kept.get(
            content,
            code_revision(),
            lambda: recipe([without_unused(build(model, logits=logits)[0]) for logits in (True, False)]),
            threads=threads,
        )
        if found is not None:
            return found
    alone = recipe([program])
    memory = _Memory(alone.bytes_at_most)
    return Pack(alone.make(memory), memory.data)


class _Memory:
    """A sink in this process's own memory."""

    def __init__(self, bytes_at_most: int) -> None:
        # Private: only then are large pages to be had everywhere.
        flags = (
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if hasattr(mmap, "MADV_HUGEPAGE") else 0)
        )
        memory = mmap.mmap(-1, max(bytes_at_most, mmap.PAGESIZE), flags=flags)
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.data = np.frombuffer(memory, np.uint8)
        self._used = 0

    def put(self, part: Bytes) -> int:
        at = self._used
        self.data[at : at + len(part)] = part
        self._used = -(-(at + len(part)) // ALIGNMENT) * ALIGNMENT
        return at


@cache
def code_revision() -> bytes:
    """16 bytes that change with any code that may decide what is in a pack: all of core and engine."""
    digest = blake2b(digest_size=16, person=b"kvmesh.packs")
    digest.update(revision().encode() + np.__version__.encode())
    for path in sorted(Path(engine.__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()
