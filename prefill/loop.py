"""The loop of a prefill worker: choose, look, step, commit, report.

One chunk at a time, in the engine's own thread; while the store hears of one run's
chunk, another run's is computed. Before each chunk the loop looks at the store again,
so that of equal prompts every block is computed once. With nothing to do it waits for
an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from engine import Executor, Slice, SliceFailure
from mesh.errors import InternalError, MeshError, Overloaded, StaleAttempt, Unavailable
from mesh.faults import NO_FAULTS, Action, FaultPoints
from mesh.kv.client import KvClient
from mesh.stuck import StuckWatch
from prefill.run import Chunk, Order, Progress, Run
from prefill.schedule import Pace, Queue
from prefill.telemetry import LoopTelemetry

log = logging.getLogger(__name__)

# Runs that have a turn at once: one computes while the other one talks to the store.
LANES = 2


class Ticket:
    """A run as its caller sees it: progress until the last block, or an error."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._news: asyncio.Queue[Progress | MeshError | None] = asyncio.Queue()

    def put(self, news: Progress | MeshError | None) -> None:
        """None ends the progress: every block is committed."""
        self._news.put_nowait(news)

    async def next(self) -> Progress | None:
        """The next progress, None after the last. Raises the MeshError that ended the run."""
        news = await self._news.get()
        if isinstance(news, MeshError):
            raise news
        return news


class PrefillLoop:
    """`most_runs` bounds the queue; what comes on top is refused."""

    def __init__(
        self,
        kv: KvClient,
        executor: Executor,
        telemetry: LoopTelemetry,
        most_runs: int,
        faults: FaultPoints = NO_FAULTS,
        watch: StuckWatch | None = None,
    ) -> None:
        self._faults = faults
        self._kv = kv
        self._executor = executor
        self._telemetry = telemetry
        self._most_runs = most_runs
        self._page_tokens = executor.info.layout.page_tokens
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._watch = watch or StuckWatch()
        self._queue = Queue()
        self._pace = Pace(self._page_tokens)
        self._tickets: dict[str, Ticket] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._turn_over = asyncio.Event()
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._current: set[Run] = set()
        self._computing = asyncio.Lock()
        self._blocks_in_work: set[bytes] = set()
        self._stopping = False

    async def run(self) -> None:
        """One turn after another in each lane, until `close`."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(LANES):
                lanes.create_task(self._lane())

    async def _lane(self) -> None:
        while not self._stopping:
            run = self._queue.next(self._current)
            if run is None:
                await self._idle()
                continue
            self._current.add(run)
            try:
                await self._turn(run)
            except MeshError as error:
                self._fail(run, error)
            except Exception:
                log.exception("run %s failed", run.order.request_id)
                self._fail(run, InternalError("the prompt could not be computed", code="step_failed"))
            finally:
                self._current.discard(run)
                self._turn_over.set()

    async def enter(self, order: Order) -> Ticket:
        """Queues a run. A later attempt of a handoff ends an earlier one here first.

        Raises StaleAttempt for one that is not later, Overloaded when the queue is full.
        """
        while (known := self._tickets.get(order.handoff_id)) is not None:
            if order.attempt <= known.run.order.attempt:
                raise StaleAttempt(f"attempt {known.run.order.attempt} of {order.handoff_id} runs here")
            known.put(StaleAttempt(f"attempt {order.attempt} of {order.handoff_id} has replaced this one"))
            await asyncio.shield(self.leave(known))
        while (leaving := self._leaving.get(order.handoff_id)) is not None:
            # Both attempts hold their pages under one lease id: the first must be gone.
            await asyncio.shield(leaving)
        if len(self._tickets) >= self._most_runs:
            raise Overloaded("the prefill queue is full", retry_after_s=1.0)
        ticket = Ticket(Run(order, asyncio.get_running_loop().time()))
        self._tickets[order.handoff_id] = ticket
        self._queue.add(ticket.run)
        self._telemetry.entered()
        self._changed()
        return ticket

    def leave(self, ticket: Ticket) -> asyncio.Task[None]:
        """Ends a run within one chunk and gives back what it leased. Idempotent."""
        run = ticket.run
        handoff_id = run.order.handoff_id
        self._queue.remove(run)
        if not run.left:
            run.left = True
            run.left_ns = time.time_ns()
            del self._tickets[handoff_id]
            self._leaving[handoff_id] = asyncio.create_task(self._release(run))
            self._changed()
        return self._leaving.get(handoff_id) or asyncio.create_task(_nothing())

    def lost(self, handoff_id: str) -> None:
        """The store could not keep what a run leased: it fails, and commits nothing more."""
        ticket = self._tickets.get(handoff_id)
        if ticket is not None:
            ticket.run.lost = True
            self._fail(ticket.run, Unavailable("the KV store lost the pages of this prompt"))

    async def drain(self, within_s: float) -> None:
        """Waits until every run has been ended by its caller, or for `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._empty()

    async def close(self) -> None:
        """Ends every run, then the engine's thread."""
        self._stopping = True
        self._changed()
        for ticket in list(self._tickets.values()):
            ticket.put(InternalError("the worker stops", code="stopping"))
            self.leave(ticket)
        while self._leaving:
            await asyncio.wait(list(self._leaving.values()))
        await asyncio.to_thread(self._engine.shutdown)

    @property
    def runs(self) -> int:
        """Runs that have a caller, the finished ones that hold their leases included."""
        return len(self._tickets)

    @property
    def queued_tokens(self) -> int:
        """Tokens that are not computed yet."""
        return sum(run.missing_blocks for run in self._queue) * self._page_tokens

    # The turn.

    async def _turn(self, run: Run) -> None:
        queue_s = self._start(run)
        if queue_s is not None and run.order.reserves:
            await self._reserve(run)
        await self._look(run)
        while self._is_being_computed(run):
            self._turn_over.clear()
            await self._turn_over.wait()
            await self._look(run)
        chunk = run.next_chunk(self._pace.blocks)
        if chunk is not None and not run.left:
            blocks = run.order.block_ids[chunk.first : chunk.end]
            self._blocks_in_work.update(blocks)
            try:
                await self._step(run, chunk)
                await self._commit(run, chunk)
            finally:
                self._blocks_in_work.difference_update(blocks)
        self._report(run, queue_s)

    def _is_being_computed(self, run: Run) -> bool:
        """Whether the other lane computes what this run needs next: an equal prompt."""
        first = run.committed_blocks
        return (
            not run.left and first < len(run.committed) and run.order.block_ids[first] in self._blocks_in_work
        )

    def _start(self, run: Run) -> float | None:
        if run.started:
            return None
        run.started = True
        self._changed()
        return asyncio.get_running_loop().time() - run.queued_at_s

    async def _reserve(self, run: Run) -> None:
        order = run.order
        await self._kv.reserve(
            order.handoff_id, order.capability, order.block_ids, order.root_id, 0, attempt=order.attempt
        )

    async def _look(self, run: Run) -> None:
        order = run.order
        run.look(await self._kv.draw(order.handoff_id, order.attempt, order.capability))

    async def _step(self, run: Run, chunk: Chunk) -> None:
        loop = asyncio.get_running_loop()
        first, end = chunk.first * self._page_tokens, chunk.end * self._page_tokens
        pages = run.table(chunk)
        slice_ = Slice(tokens=run.order.tokens[first:end], start=first, pages=pages, logits=0)
        async with self._computing:
            started = loop.time()
            with self._watch.over("a chunk"):
                await self._faults.delay("chunk")
                [result] = await loop.run_in_executor(self._engine, self._executor.step, [slice_])
            took_s = loop.time() - started
        run.last_step_ns = time.time_ns()
        if run.left_ns:
            self._telemetry.cancelled((run.last_step_ns - run.left_ns) / 1e9)
        if isinstance(result, SliceFailure):
            raise InternalError(result.message, code="step_failed")
        run.computed_tokens += end - first
        self._pace.measured(end - first, took_s)
        self._telemetry.computed(end - first, took_s)

    async def _commit(self, run: Run, chunk: Chunk) -> None:
        order = run.order
        if run.left or run.lost:
            return
        fault = self._faults.at("commit")
        if fault is not None and fault.action is Action.DELAY:
            await asyncio.sleep(fault.seconds)
        if fault is not None and fault.action is Action.DROP:
            raise Unavailable("a fault point has dropped this commit")
        winners = await self._kv.commit(order.handoff_id, run.items(chunk), attempt=order.attempt)
        if fault is not None and fault.action is Action.DUPLICATE:
            winners = await self._kv.commit(order.handoff_id, run.items(chunk), attempt=order.attempt)
        if fault is not None and fault.action is Action.CORRUPT:
            _corrupt(self._kv, winners[0].index)
        self._kv.give(run.settle(chunk, winners))

    def _report(self, run: Run, queue_s: float | None) -> None:
        ticket = self._tickets.get(run.order.handoff_id)
        if run.left or run.lost or ticket is None:
            return
        ticket.put(Progress(run.committed_blocks, run.computed_tokens, queue_s))
        if run.missing_blocks == 0:
            self._queue.remove(run)
            ticket.put(None)
            self._changed()

    def _fail(self, run: Run, error: MeshError) -> None:
        self._queue.remove(run)
        ticket = self._tickets.get(run.order.handoff_id)
        if ticket is not None and ticket.run is run:
            ticket.put(error)
        self._changed()

    # Beside the turn.

    async def _empty(self) -> None:
        while self._tickets:
            self._left.clear()
            await self._left.wait()

    async def _release(self, run: Run) -> None:
        try:
            while run in self._current:
                self._turn_over.clear()
                await self._turn_over.wait()
            await self._kv.release(run.order.handoff_id)
        finally:
            del self._leaving[run.order.handoff_id]
            self._left.set()

    async def _idle(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def _changed(self) -> None:
        running = sum(run.started for run in self._queue)
        self._telemetry.queue(running=running, waiting=len(self._queue) - running)
        self._wake.set()


async def _nothing() -> None:
    return


def _corrupt(kv: KvClient, page: int) -> None:
    """Turns one bit of a page over, for a test of whoever reads it next."""
    place = page * kv.page_bytes + kv.page_bytes // 2
    kv.arena[place] ^= 1
