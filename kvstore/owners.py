"""Who holds pages: owners (worker processes, by epoch) and reservations (handoffs).

Plain data; the rules are in `pool.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh.kv.page import Page


@dataclass(slots=True)
class Owner:
    """One life of one worker process.

    `leases`: lease id → committed pages. `granted`: pages it may write to. `drawn`:
    handoff id → page → block index, taken from a reservation for writing. `fenced`:
    handoff id → pages that a later attempt took from it, which it may still write.
    """

    epoch: int
    worker: str
    attached: bool = True
    leases: dict[str, dict[int, None]] = field(default_factory=dict)
    granted: set[int] = field(default_factory=set)
    drawn: dict[str, dict[int, int]] = field(default_factory=dict)
    fenced: dict[str, set[int]] = field(default_factory=dict)

    def writable(self) -> list[int]:
        """Every page whose bytes this owner could be changing right now."""
        pages = list(self.granted)
        for drawn in self.drawn.values():
            pages.extend(drawn)
        return pages


@dataclass(slots=True)
class Slot:
    """One block of a reservation: committed in a page, or a page set aside for it.

    `committed` and `aside` are page numbers or None; `drawer` is the epoch that
    writes `aside`, 0 while nobody does.
    """

    block_id: bytes
    committed: int | None = None
    aside: int | None = None
    drawer: int = 0


@dataclass(slots=True)
class Handoff:
    """A reservation: the blocks that `owner` waits for. `attempt` is None until a draw."""

    handoff_id: str
    owner: int
    org: str
    slots: list[Slot]
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class CommittedFrame:
    """News for an owner: blocks of its reservation, committed and leased to it."""

    epoch: int
    handoff_id: str
    blocks: list[tuple[int, Page]]


@dataclass(frozen=True, slots=True)
class Reattached:
    """What a re-attach could not take up again."""

    rejected_leases: list[str]
    rejected_granted: list[Page]
    # Leases that no reservation stands behind.
    unreserved: list[str]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A block to commit, with the checksum of its bytes."""

    page: Page
    block_id: bytes
    parent_id: bytes
    checksum: int
