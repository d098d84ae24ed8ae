"""What this worker holds, as it knows it: the truth that a re-attach is told.

Pure bookkeeping. A page that the worker may write is `owned`; it lies idle in the
local pool, is used by somebody, or was drawn for a lease. A commit whose answer
never came leaves its pages in doubt: they are neither handed out nor forgotten
until the store has said what became of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mesh.kv.page import CommitItem, Held, Page
from mesh.kv.protection import Owned, Protection


class Books:
    """Leases, owned pages, and the local pool of idle ones."""

    def __init__(self) -> None:
        self._idle: dict[int, Page] = {}
        self._owned = Owned()
        self._drawn: dict[str, dict[int, Page]] = {}
        self._leases: dict[str, dict[int, tuple[Page, bytes]]] = {}
        # Page → the lease ("" once released) and block of a commit whose outcome is unknown.
        self._doubtful: dict[int, tuple[str, bytes]] = {}
        self._parked: dict[int, Page] = {}

    def protect(self, protection: Protection) -> None:
        """From now on pages can be written while they are owned, and only then."""
        self._owned.came, self._owned.went = protection.allow, protection.forbid

    @property
    def idle(self) -> int:
        """Pages in the local pool."""
        return len(self._idle)

    @property
    def busy(self) -> bool:
        """Whether anything but the local pool is held."""
        return bool(self._leases or self._drawn or len(self._owned) > len(self._idle))

    def grant(self, pages: Iterable[Page]) -> None:
        """Pages to write, on their way to a user."""
        for page in pages:
            self._owned[page.index] = page

    def store(self, pages: Iterable[Page]) -> None:
        """Owned pages that nobody uses."""
        for page in pages:
            self._idle[page.index] = page

    def take(self, n: int) -> list[Page] | None:
        """`n` idle pages for use, or None if there are not as many."""
        if n > len(self._idle):
            return None
        return [self._idle.popitem()[1] for _ in range(n)]

    def give(self, pages: Iterable[Page]) -> None:
        """Pages that their user is done with. What is not owned for free use is passed over:
        drawn pages go with their lease, committed ones were never given back."""
        for page in pages:
            if self._owned.get(page.index) != page or page.index in self._idle:
                continue
            if any(page.index in drawn for drawn in self._drawn.values()):
                continue
            if page.index in self._doubtful:
                self._parked[page.index] = page
            else:
                self._idle[page.index] = page

    def give_up(self, n: int) -> list[Page]:
        """Takes `n` idle pages out of the books, to be returned to the store."""
        pages = self.take(min(n, len(self._idle))) or []
        for page in pages:
            del self._owned[page.index]
        return pages

    def hold(self, lease_id: str, page: Page, block_id: bytes) -> None:
        """A committed page, leased."""
        self._leases.setdefault(lease_id, {})[page.index] = (page, block_id)

    def draw(self, lease_id: str, pages: Iterable[Page]) -> None:
        """Pages of a reservation, to write."""
        drawn = self._drawn.setdefault(lease_id, {})
        for page in pages:
            self._owned[page.index] = drawn[page.index] = page

    def committed(self, lease_id: str, items: Sequence[CommitItem], winners: Sequence[Page]) -> None:
        """Own pages that won are no longer written; losers are free to be given."""
        drawn = self._drawn.get(lease_id, {})
        for item, winner in zip(items, winners, strict=True):
            drawn.pop(item.page.index, None)
            self._doubtful.pop(item.page.index, None)
            if winner == item.page:
                self._owned.discard(winner.index)
            elif (parked := self._parked.pop(item.page.index, None)) is not None:
                self._idle[parked.index] = parked
            self.hold(lease_id, winner, item.block_id)

    def doubt(self, lease_id: str, items: Iterable[CommitItem]) -> None:
        """A commit is being sent: until its answer comes nobody knows what the pages are."""
        for item in items:
            if self._owned.get(item.page.index) == item.page:
                self._doubtful[item.page.index] = (lease_id, item.block_id)

    def refused(self, items: Iterable[CommitItem]) -> None:
        """The store refused a commit: its pages are what they were."""
        for item in items:
            self._doubtful.pop(item.page.index, None)
            parked = self._parked.pop(item.page.index, None)
            if parked is not None:
                self._idle[parked.index] = parked

    def release(self, lease_id: str) -> None:
        """Forgets a lease with what was drawn for it."""
        self._leases.pop(lease_id, None)
        for index, (doubted, block_id) in self._doubtful.items():
            if doubted == lease_id:
                self._doubtful[index] = ("", block_id)
        for index in self._drawn.pop(lease_id, {}):
            self._owned.discard(index)
            self._doubtful.pop(index, None)
            self._parked.pop(index, None)

    def listing(self, names: Iterable[str] = ()) -> tuple[list[Held], list[Page]]:
        """What a re-attach tells the store: leases, and pages that this worker may be writing.

        `names` are leases to list even if nothing is held under them yet.
        """
        held: dict[str, list[tuple[Page, bytes]]] = {lease_id: [] for lease_id in (*names, *self._drawn)}
        for lease_id, pages in self._leases.items():
            held.setdefault(lease_id, []).extend(pages.values())
        for index, (lease_id, block_id) in self._doubtful.items():
            if lease_id and index in self._owned:
                held.setdefault(lease_id, []).append((self._owned[index], block_id))
        return (
            [Held(i, tuple(p for p, _ in pages), tuple(b for _, b in pages)) for i, pages in held.items()],
            list(self._owned.values()),
        )

    def reattached(self, rejected: Iterable[Page]) -> None:
        """The store has settled every doubt: `rejected` pages are committed or gone, the others ours."""
        for page in rejected:
            if self._owned.get(page.index) != page:
                continue
            del self._owned[page.index]
            self._parked.pop(page.index, None)
            self._idle.pop(page.index, None)
            for drawn in self._drawn.values():
                drawn.pop(page.index, None)
            doubt = self._doubtful.get(page.index)
            if doubt is not None and doubt[0]:
                self.hold(doubt[0], page, doubt[1])
        self._doubtful.clear()
        self._idle |= self._parked
        self._parked.clear()
