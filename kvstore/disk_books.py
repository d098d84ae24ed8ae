"""What is on disk: which blocks, whose, how many bytes, and which goes next. Pure.

A block goes only when no block on disk continues it, the longest unused first; where
one is lost, so are those that continue it, for nothing would ever ask for them. One
organisation has at most its share. It does not know files.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.disk_files import Place


@dataclass(slots=True)
class Kept:
    """One block on disk. `number` names this life of it."""

    place: Place
    file_bytes: int
    number: int
    last_use: int


# last use and number
_Leaf = tuple[int, int]


class DiskBooks:
    """At most `limit_bytes` in all, and `org_share` of them for one organisation."""

    def __init__(self, limit_bytes: int, org_share: float = 1.0) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.blocks = 0
        self._most_of_one = int(limit_bytes * org_share)
        self._bytes_of: dict[str, int] = {}
        self._arenas: dict[str, dict[bytes, Kept]] = {}
        self._numbered: dict[int, Kept] = {}
        self._children: dict[tuple[str, bytes], dict[bytes, None]] = {}
        self._leaves: list[_Leaf] = []
        self._leaves_of: dict[str, list[_Leaf]] = {}
        self._clock = 0

    def of(self, arena: str) -> Mapping[bytes, Kept]:
        """The blocks of one arena."""
        return self._arenas.get(arena, {})

    def make_room(self, org: str, file_bytes: int) -> list[Kept] | None:
        """What has to go (and is forgotten) so that one more file fits; None if it never can."""
        if file_bytes > min(self.limit_bytes, self._most_of_one):
            return None
        gone: list[Kept] = []
        while self._bytes_of.get(org, 0) + file_bytes > self._most_of_one:
            gone += self._evict(self._leaves_of[org])
        while self.bytes + file_bytes > self.limit_bytes:
            gone += self._evict(self._leaves)
        return gone

    def add(self, place: Place, file_bytes: int) -> Kept:
        """A block that is on disk now; room was made for it."""
        self._clock += 1
        kept = Kept(place, file_bytes, self._clock, self._clock)
        self._arenas.setdefault(place.arena, {})[place.block_id] = self._numbered[kept.number] = kept
        self._children.setdefault((place.arena, place.parent_id), {})[place.block_id] = None
        self.bytes += file_bytes
        self.blocks += 1
        self._bytes_of[place.org] = self._bytes_of.get(place.org, 0) + file_bytes
        self._offer(kept)
        return kept

    def used(self, kept: Kept) -> None:
        """It was wanted: it goes later."""
        self._clock += 1
        kept.last_use = self._clock
        self._offer(kept)

    def lose(self, arena: str, block_id: bytes) -> list[Kept]:
        """Forgets a block, on disk or not, with all that continue it; returns what was on disk."""
        gone: list[Kept] = []
        doomed = [block_id]
        while doomed:
            block = doomed.pop()
            doomed.extend(self._children.get((arena, block), ()))
            if (kept := self.of(arena).get(block)) is not None:
                self._forget(kept)
                gone.append(kept)
        return gone

    def of_organisation(self, org: str) -> list[Kept]:
        """Every block of an organisation."""
        return [kept for kept in self._numbered.values() if kept.place.org == org]

    def _offer(self, kept: Kept) -> None:
        leaf = (kept.last_use, kept.number)
        self._leaves = self._with(self._leaves, leaf)
        self._leaves_of[kept.place.org] = self._with(self._leaves_of.get(kept.place.org, []), leaf)

    def _with(self, leaves: list[_Leaf], leaf: _Leaf) -> list[_Leaf]:
        heapq.heappush(leaves, leaf)
        if len(leaves) > 2 * self.blocks + 64:
            leaves = list({entry for entry in leaves if self._is_leaf(entry)})
            heapq.heapify(leaves)
        return leaves

    def _is_leaf(self, leaf: _Leaf) -> bool:
        last_use, number = leaf
        kept = self._numbered.get(number)
        return (
            kept is not None
            and kept.last_use == last_use
            and (kept.place.arena, kept.place.block_id) not in self._children
        )

    def _evict(self, leaves: list[_Leaf]) -> list[Kept]:
        # There is one while there are any bytes: ids are digests, so no block continues itself.
        while not self._is_leaf(leaf := heapq.heappop(leaves)):
            pass
        kept = self._numbered[leaf[1]]
        self._forget(kept)
        return [kept]

    def _forget(self, kept: Kept) -> None:
        place = kept.place
        del self._arenas[place.arena][place.block_id], self._numbered[kept.number]
        self.bytes -= kept.file_bytes
        self.blocks -= 1
        self._bytes_of[place.org] -= kept.file_bytes
        if not self._bytes_of[place.org]:
            del self._bytes_of[place.org], self._leaves_of[place.org]
        siblings = self._children[(place.arena, place.parent_id)]
        del siblings[place.block_id]
        if not siblings:
            del self._children[(place.arena, place.parent_id)]
            if (parent := self.of(place.arena).get(place.parent_id)) is not None:
                self._offer(parent)
