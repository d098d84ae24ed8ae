"""A thousand faults on the way of a page: recomputed or a clear error, never built upon.

Every fault that a network, a sender or a memory can make is put between two arenas:
the blocks that are committed at the end hold exactly what they should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import xxhash

from kvstore import recovery
from kvstore.arena import Arena
from kvstore.files import ArenaKey, create_files
from kvstore.imports import Arrival, Fetching, Import
from kvstore.invariants import violations
from kvstore.owners import Sealed
from kvstore.seals import seal
from kvstore.table import PageState
from mesh.errors import MeshError, Unavailable
from mesh.supervisor.sweep import remove_arenas
from tests.kvstore.node import FINGERPRINT, prompt

PAGE_BYTES = 512
PAGES = 24
FAULTS = (
    "flipped bit",
    "truncated",
    "older bytes",
    "another block",
    "wrong seal",
    "twice",
    "broken stream",
    "ended early",
    "unasked",
)


def content(block_id: bytes) -> bytes:
    return block_id * (PAGE_BYTES // len(block_id))


class _FaultySource:
    """Sends the true pages, except where `chance` says otherwise."""

    def __init__(self, parents: dict[bytes, bytes], chance: Random, seen: Counter[str], rate: float) -> None:
        self._parents, self._chance, self._seen, self._rate = parents, chance, seen, rate

    async def pull(self, handoff_id: str, places: dict[bytes, memoryview]) -> AsyncIterator[list[Arrival]]:
        for block_id, place in places.items():
            fault = self._chance.choice(FAULTS) if self._chance.random() < self._rate else ""
            self._seen[fault] += 1
            data, sealed = bytearray(content(block_id)), self._seal(block_id)
            match fault:
                case "flipped bit":
                    data[self._chance.randrange(PAGE_BYTES)] ^= 1 << self._chance.randrange(8)
                case "truncated":
                    data[self._chance.randrange(1, PAGE_BYTES) :] = b""
                case "older bytes":
                    data[:] = b"\xff" * PAGE_BYTES
                case "another block":
                    other = self._chance.choice(list(self._parents))
                    data[:], sealed = content(other), self._seal(other)
                case "wrong seal":
                    sealed ^= 1 << self._chance.randrange(64)
                case "broken stream":
                    place[: PAGE_BYTES // 2] = data[: PAGE_BYTES // 2]
                    raise Unavailable("the stream broke")
                case "ended early":
                    return
            place[: len(data)] = data
            arrival = Arrival(block_id, sealed, xxhash.xxh3_64_intdigest(place))
            if fault == "unasked":
                yield [Arrival(b"?" * 16, sealed, arrival.found)]
            yield [arrival] * (2 if fault == "twice" else 1)

    def _seal(self, block_id: bytes) -> int:
        checksum = xxhash.xxh3_64_intdigest(content(block_id))
        return seal(block_id, self._parents[block_id], checksum)


@pytest.fixture
def arena(tmp_path: Path) -> object:
    key = ArenaKey("m", FINGERPRINT, b"l" * 16)
    made = Arena(create_files(tmp_path, key, "", PAGES, PAGE_BYTES), debug_fill=True)
    yield made
    made.files.close()
    remove_arenas(tmp_path)


def _check(arena: Arena) -> None:
    assert not violations(arena.pool)
    for block_id, index in arena.pool.table.index.items():
        assert bytes(arena.files.page(index)) == content(block_id)


async def test_whatever_happens_on_the_way_only_true_pages_are_committed(arena: Arena) -> None:
    chance, seen, outcomes = Random(11), Counter[str](), Counter[str]()
    recovery.open_owner(arena.pool, 1, "decode")
    for n in range(700):
        root, ids = prompt(chance.randint(1, 6), seed=n)
        parents = dict(zip(ids, [root, *ids], strict=False))
        arena.pool.reserve(1, "h", "org", ids, 0)
        source = _FaultySource(parents, chance, seen, rate=chance.choice((0.2, 0.6, 1.0)))
        order = Fetching("h", "org", 1, root)
        try:
            await Import(arena, order, source, lambda a: a.settle() and None, patience_s=0.002).run()
            outcomes["whole"] += 1
            assert arena.pool.lookup(ids) == len(ids)
        except MeshError as error:
            outcomes[error.code or "other"] += 1
        _check(arena)
        # Whatever is missing is computed by the next attempt.
        drawn = arena.pool.draw(1, "h", "org", 2)
        for i, page in drawn.writable:
            arena.files.page(page.index)[:] = content(ids[i])
            found = xxhash.xxh3_64_intdigest(arena.files.page(page.index))
            arena.pool.commit(1, "h", [Sealed(page, ids[i], parents[ids[i]], found)], 2)
        assert arena.pool.lookup(ids) == len(ids)
        arena.pool.release(1, ["h"], [])
        arena.settle()
        _check(arena)
    assert sum(seen[fault] for fault in FAULTS) >= 1000, seen
    assert all(seen[fault] > 50 for fault in FAULTS), seen
    assert outcomes["whole"] > 50, outcomes
    assert sum(outcomes.values()) - outcomes["whole"] > 50, outcomes
    counts = arena.pool.counts()
    assert counts[PageState.FREE] + counts[PageState.CACHED] == PAGES


async def test_pages_that_changed_while_no_store_ran_are_never_leased(arena: Arena) -> None:
    chance, spoilt_blocks = Random(12), 0
    for n in range(120):
        arena.pool.__init__(PAGES)  # type: ignore[misc]
        recovery.open_owner(arena.pool, 1, "decode")
        root, ids = prompt(8, seed=n)
        for i, page in enumerate(arena.pool.grant(1, 8)):
            arena.files.page(page.index)[:] = content(ids[i])
            found = xxhash.xxh3_64_intdigest(arena.files.page(page.index))
            arena.pool.commit(1, "h", [Sealed(page, ids[i], ids[i - 1] if i else root, found)])
        where = dict(arena.pool.table.index)
        arena.settle()
        spoilt = chance.sample(ids, chance.randint(1, 4))
        for block_id in spoilt:
            arena.files.page(where[block_id])[chance.randrange(PAGE_BYTES)] ^= 1 << chance.randrange(8)
        arena.pool.__init__(PAGES)  # type: ignore[misc]
        arena.adopt({})
        recovery.open_owner(arena.pool, 1, "decode")
        await arena.verify(ids)
        assert not any(block_id in arena.pool.table.index for block_id in spoilt)
        have = arena.pool.reserve(1, "h", "org", ids, 0).have
        assert len(have) == min(ids.index(b) for b in spoilt)
        assert all(bytes(arena.files.page(p.index)) == content(ids[i]) for i, p in enumerate(have))
        spoilt_blocks += len(spoilt)
        assert not violations(arena.pool)
    assert spoilt_blocks > 250
