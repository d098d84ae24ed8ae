"""The page pool against a model that knows only lists: a random walk over its whole life.

The reference keeps, per worker, what that worker believes it holds, and which block
is committed where. It never looks inside the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from kvstore import recovery
from kvstore.invariants import violations
from kvstore.owners import Sealed
from kvstore.pool import PagePool
from kvstore.table import PageRecord, PageState
from mesh.errors import Conflict, NotFound, OutOfPages, StaleAttempt, StaleHandle
from mesh.kv.page import Held, Page

ROOT = b"root" * 4
CHAINS = 10
DEPTH = 6
RARELY = st.integers(0, 4).map(lambda n: n == 4)


def block(chain: int, depth: int) -> bytes:
    """Chains share their first two blocks, like prompts with one system message."""
    return f"{chain if depth >= 2 else 's'}/{depth}".encode().ljust(16, b".")


def parent(chain: int, depth: int) -> bytes:
    return block(chain, depth - 1) if depth else ROOT


@dataclass
class Handoff:
    """What a worker knows of its reservation: block index → page."""

    chain: int
    blocks: int
    got: dict[int, Page]
    attempt: int = 0


@dataclass
class Worker:
    epoch: int
    attached: bool = True
    leases: dict[str, dict[bytes, Page]] = field(default_factory=dict)
    granted: list[Page] = field(default_factory=list)
    handoffs: dict[str, Handoff] = field(default_factory=dict)
    # handoff → (attempt, chain, block index → page to write)
    drawn: dict[str, tuple[int, int, dict[int, Page]]] = field(default_factory=dict)


class PoolMachine(RuleBasedStateMachine):
    """Workers reserve, draw, commit, release, break, come back and die in any order."""

    @initialize(pages=st.integers(6, 20), workers=st.integers(2, 3))
    def begin(self, pages: int, workers: int) -> None:
        self.pool = PagePool(pages)
        self.pages = pages
        self.evicted = 0
        self.granted_before: set[Page] = set()
        self.overtaken: set[tuple[int, str]] = set()
        self.workers: dict[int, Worker] = {}
        self.next_epoch = 1
        self.next_handoff = 0
        self.where: dict[bytes, Page] = {}
        for _ in range(workers):
            self.spawn()

    def spawn(self) -> None:
        recovery.open_owner(self.pool, self.next_epoch, f"w{self.next_epoch}")
        self.workers[self.next_epoch] = Worker(self.next_epoch)
        self.next_epoch += 1

    def new_life(self, pages: list[Page]) -> None:
        """A handle that was granted once is never granted again."""
        assert self.granted_before.isdisjoint(pages)
        self.granted_before.update(pages)

    def room(self, wanted: list[bytes]) -> int:
        """Pages that can be had while `wanted` stay: free ones, and cached blocks that no
        leased or wanted block continues."""
        records = [self.pool.table.records[i] for i in self.pool.table.index.values()]
        parents = {r.block_id: r.parent_id for r in records}
        kept: set[bytes] = set()
        for record in records:
            block_id = record.block_id
            if record.state is PageState.LEASED or block_id in wanted:
                while block_id in parents and block_id not in kept:
                    kept.add(block_id)
                    block_id = parents[block_id]
        return self.pool.counts()[PageState.FREE] + len(parents.keys() - kept)

    def pick(self, n: int, *, attached: bool = True) -> Worker | None:
        able = [w for w in self.workers.values() if w.attached == attached]
        return able[n % len(able)] if able else None

    def settle(self) -> None:
        """Delivers frames and follows what the pool says was stored and removed."""
        changes = self.pool.take_changes()
        self.evicted += len(changes.removed)
        for block_id in changes.removed:
            self.check_evictable(block_id)
        index = self.pool.table.index
        continued = {self.pool.table.records[i].parent_id for i in index.values()}
        assert continued.isdisjoint(set(changes.removed) - index.keys()), "evicted before what continues it"
        self.where = {b: self.pool.table.records[i].handle for b, i in self.pool.table.index.items()}
        for frame in self.pool.take_frames():
            worker = self.workers[frame.epoch]
            if not worker.attached:
                continue
            handoff = worker.handoffs[frame.handoff_id]
            for i, page in frame.blocks:
                handoff.got[i] = page
                worker.leases.setdefault(frame.handoff_id, {})[block(handoff.chain, i)] = page

    def check_evictable(self, block_id: bytes) -> None:
        for worker in self.workers.values():
            for lease in worker.leases.values():
                assert block_id not in lease, "a leased block was evicted"

    @rule(
        n=st.integers(0, 5),
        chain=st.integers(0, CHAINS - 1),
        blocks=st.integers(1, DEPTH),
        extra=st.integers(0, 2),
    )
    def reserve(self, n: int, chain: int, blocks: int, extra: int) -> None:
        handoff_id = f"h{self.next_handoff}"
        self.next_handoff += 1
        worker = self.pick(n)
        if worker is None:
            return
        ids = [block(chain, i) for i in range(blocks)]
        cached = self.pool.lookup(ids)
        room = self.room(ids[:cached])
        try:
            reserved = self.pool.reserve(worker.epoch, handoff_id, "org", ids, extra)
        except OutOfPages:
            assert room < blocks - cached + extra, "refused though it fits"
            assert handoff_id not in self.pool.handoffs
            self.settle()
            return
        assert len(reserved.have) == cached
        assert reserved.missing == blocks - cached
        assert len(reserved.extra) == extra
        self.new_life(reserved.extra)
        worker.granted += reserved.extra
        worker.handoffs[handoff_id] = Handoff(chain, blocks, dict(enumerate(reserved.have)))
        if reserved.have:
            worker.leases[handoff_id] = {ids[i]: p for i, p in enumerate(reserved.have)}
        self.settle()

    @rule(n=st.integers(0, 5), which=st.integers(0, 5), later=st.booleans())
    def overtake(self, n: int, which: int, later: bool) -> None:
        """Another worker reserves what a first one, which may hang, has reserved."""
        worker, handoff_id = self.pick(n), self.live(which)
        home = [w for w in self.workers.values() if handoff_id in w.handoffs]
        if worker is None or not home or home[0] is worker:
            return
        known = home[0].handoffs[handoff_id]
        ids = [block(known.chain, i) for i in range(known.blocks)]
        attempt = known.attempt + 1 if later else known.attempt
        try:
            reserved = self.pool.reserve(worker.epoch, handoff_id, "org", ids, 0, attempt)
        except Conflict:
            assert not later
            return
        except OutOfPages:
            # What the worker itself held under that name went first.
            worker.leases.pop(handoff_id, None)
            worker.drawn.pop(handoff_id, None)
            self.settle()
            return
        assert later
        self.overtaken |= {(w.epoch, handoff_id) for w in self.workers.values() if handoff_id in w.drawn}
        del home[0].handoffs[handoff_id]
        worker.drawn.pop(handoff_id, None)
        worker.handoffs[handoff_id] = Handoff(
            known.chain, known.blocks, dict(enumerate(reserved.have)), attempt
        )
        worker.leases[handoff_id] = {ids[i]: p for i, p in enumerate(reserved.have)}
        self.settle()

    def live(self, n: int) -> str:
        """The name of a reservation that exists; of none if there is none."""
        names = sorted({h for w in self.workers.values() for h in w.handoffs})
        return names[n % len(names)] if names else "gone"

    def attempt(self, n: int) -> int:
        """The newest attempt of that reservation."""
        name = self.live(n)
        return max((w.handoffs[name].attempt for w in self.workers.values() if name in w.handoffs), default=0)

    @rule(n=st.integers(0, 5), which=st.integers(0, 5), attempt=st.integers(0, 3))
    def draw(self, n: int, which: int, attempt: int) -> None:
        worker, handoff_id = self.pick(n), self.live(which)
        if worker is None:
            return
        home = [w for w in self.workers.values() if handoff_id in w.handoffs]
        others = {w.epoch for w in self.workers.values() if handoff_id in w.drawn and w is not worker}
        try:
            drawn = self.pool.draw(worker.epoch, handoff_id, "org", attempt)
        except NotFound:
            assert not home
            return
        except StaleAttempt:
            assert home[0].handoffs[handoff_id].attempt >= attempt
            return
        except OutOfPages:
            assert others
            self.settle()
            return
        handoff = home[0].handoffs[handoff_id]
        assert attempt >= handoff.attempt
        handoff.attempt = attempt
        indices = sorted([i for i, _ in drawn.committed] + [i for i, _ in drawn.writable])
        assert indices == list(range(handoff.blocks))
        known = worker.drawn.get(handoff_id, (0, 0, {}))[2]
        worker.drawn[handoff_id] = (attempt, handoff.chain, known | dict(drawn.writable))
        for i, page in drawn.committed:
            worker.leases.setdefault(handoff_id, {})[block(handoff.chain, i)] = page
            if worker is home[0]:
                handoff.got[i] = page
        for other in self.workers.values():
            if other is not worker and handoff_id in other.drawn:
                theirs = other.drawn[handoff_id][2]
                written = {p.index for p in theirs.values()}
                assert written.isdisjoint(p.index for _, p in drawn.writable), "two may write one page"
                replaced = [
                    self.pool.table.records[theirs[i].index] for i, _ in drawn.writable if i in theirs
                ]
                # What was drawn from a reservation that is no more stays its drawer's own.
                assert all(
                    r.state is PageState.QUARANTINED or (other.epoch, handoff_id) in self.overtaken
                    for r in replaced
                ), "it may write no more"
        self.settle()

    @rule(n=st.integers(0, 5), which=st.integers(0, 5), count=st.integers(1, DEPTH))
    def commit_drawn(self, n: int, which: int, count: int) -> None:
        drawers = [(w, h) for w in self.workers.values() if w.attached for h in sorted(w.drawn)]
        if not drawers:
            return
        worker, handoff_id = drawers[(n + which) % len(drawers)]
        attempt, chain, pages = worker.drawn[handoff_id]
        chosen = sorted(pages)[:count]
        items = [Sealed(pages[i], block(chain, i), parent(chain, i), i) for i in chosen]
        try:
            winners = self.pool.commit(worker.epoch, handoff_id, items, attempt)
        except (StaleAttempt, StaleHandle):
            known = [w.handoffs[handoff_id] for w in self.workers.values() if handoff_id in w.handoffs]
            assert all(handoff.attempt >= attempt for handoff in known)
            return
        for i, item, winner in zip(chosen, items, winners, strict=True):
            assert self.pool.table.index[item.block_id] == winner.index
            if item.block_id in self.where:
                assert winner == self.where[item.block_id], "the first committer wins"
            if winner != item.page:
                worker.granted.append(item.page)
            del pages[i]
            worker.leases.setdefault(handoff_id, {})[item.block_id] = winner
            if handoff_id in worker.handoffs:
                worker.handoffs[handoff_id].got[i] = winner
        again = self.pool.commit(
            worker.epoch, handoff_id, [s for s, w in zip(items, winners, strict=True) if s.page == w], attempt
        )
        assert again == [w for s, w in zip(items, winners, strict=True) if s.page == w]
        self.settle()

    @rule(n=st.integers(0, 5), chain=st.integers(0, CHAINS - 1), depth=st.integers(0, DEPTH - 1))
    def commit_granted(self, n: int, chain: int, depth: int) -> None:
        worker = self.pick(n)
        if worker is None or not worker.granted:
            return
        page = worker.granted.pop()
        item = Sealed(page, block(chain, depth), parent(chain, depth), 7)
        (winner,) = self.pool.commit(worker.epoch, "own", [item])
        if winner != page:
            assert winner == self.where[item.block_id]
            worker.granted.append(page)
        worker.leases.setdefault("own", {})[item.block_id] = winner
        self.settle()

    @rule(n=st.integers(0, 5), count=st.integers(1, 4), partial=st.booleans())
    def grant(self, n: int, count: int, partial: bool) -> None:
        worker = self.pick(n)
        if worker is None:
            return
        before = self.pool.counts()
        try:
            pages = self.pool.grant(worker.epoch, count, partial=partial)
        except OutOfPages:
            assert not partial
            return
        finally:
            self.settle()
        assert len(pages) == count or (partial and before[PageState.FREE] < count)
        self.new_life(pages)
        worker.granted += pages

    @rule(n=st.integers(0, 5), which=st.integers(0, 5))
    def release(self, n: int, which: int) -> None:
        worker = self.pick(n)
        if worker is None:
            return
        names = sorted({*worker.leases, *worker.handoffs, *worker.drawn})
        if not names or which == 0:
            self.pool.release(worker.epoch, [], worker.granted)
            for page in worker.granted:
                with pytest.raises(StaleHandle):
                    self.pool.commit(worker.epoch, "own", [Sealed(page, b"x" * 16, ROOT, 0)])
            worker.granted = []
        else:
            name = names[which % len(names)]
            for held in (worker.leases, worker.handoffs, worker.drawn):
                held.pop(name, None)
            self.pool.release(worker.epoch, [name], [])
            self.pool.release(worker.epoch, [name], [])
        self.settle()

    @rule(n=st.integers(0, 5), really=RARELY)
    def session_breaks(self, n: int, really: bool) -> None:
        worker = self.pick(n)
        if worker is not None and really:
            recovery.orphan(self.pool, worker.epoch)
            worker.attached = False

    @rule(n=st.integers(0, 5), forget=st.booleans())
    def comes_back(self, n: int, forget: bool) -> None:
        worker = self.pick(n, attached=False)
        if worker is None:
            return
        if forget:
            worker.granted = worker.granted[:-1]
        self.attach(worker)
        self.settle()

    def attach(self, worker: Worker) -> None:
        names = {*worker.leases, *worker.handoffs, *worker.drawn}
        leases = {n: worker.leases.get(n, {}) for n in sorted(names)}
        held = [Held(n, tuple(lease.values()), tuple(lease)) for n, lease in leases.items()]
        writable = [*worker.granted, *(p for _, _, d in worker.drawn.values() for p in d.values())]
        answer = recovery.reattach(self.pool, worker.epoch, held, writable)
        assert answer.rejected_leases == []
        assert answer.rejected_granted == []
        assert set(answer.unreserved).isdisjoint(worker.handoffs)
        worker.attached = True

    @rule(n=st.integers(0, 5), attached=st.booleans(), really=RARELY)
    def dies(self, n: int, attached: bool, really: bool) -> None:
        worker = self.pick(n, attached=attached)
        if worker is None or not really:
            return
        del self.workers[worker.epoch]
        recovery.bury(self.pool, worker.epoch)
        self.spawn()
        self.settle()

    @rule(dead=st.integers(0, 1), really=RARELY)
    def store_restarts(self, dead: int, really: bool) -> None:
        """A new pool adopts the records; reservations are lost, and workers come back one by one."""
        if not really:
            return
        old = [
            PageRecord(
                r.index,
                PageState.QUARANTINED if r.condemned else r.state,
                r.generation,
                r.owner,
                r.block_id,
                r.parent_id,
                r.checksum,
            )
            for r in self.pool.table.records
        ]
        for epoch in list(self.workers)[:dead]:
            del self.workers[epoch]
        self.pool = PagePool(self.pages)
        recovery.adopt(self.pool, old, {w.epoch: f"w{w.epoch}" for w in self.workers.values()})
        self.settle()
        assert not violations(self.pool)
        for worker in self.workers.values():
            worker.attached = False
            for handoff_id, handoff in worker.handoffs.items():
                if not handoff.got:
                    worker.leases.pop(handoff_id, None)
            worker.handoffs = {}
        # One that has nothing to come back with begins at once.
        self.spawn()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert violations(self.pool) == []
        for worker in self.workers.values():
            for lease in worker.leases.values():
                for block_id, page in lease.items():
                    record = self.pool.table.records[page.index]
                    assert record.generation == page.generation, "a leased page was reused"
                    assert record.block_id == block_id
            for page in worker.granted:
                record = self.pool.table.records[page.index]
                assert record.generation == page.generation
                assert record.owner == worker.epoch
                assert record.state is (PageState.GRANTED if worker.attached else PageState.QUARANTINED)

    def teardown(self) -> None:
        """When everybody is gone, every page is free or cached, and all can be had."""
        if not hasattr(self, "pool"):
            return
        for epoch in list(self.workers):
            recovery.bury(self.pool, epoch)
        assert violations(self.pool) == []
        counts = self.pool.counts()
        assert counts[PageState.FREE] + counts[PageState.CACHED] == self.pages
        recovery.open_owner(self.pool, 1_000_000, "last")
        assert len(self.pool.grant(1_000_000, self.pages)) == self.pages
