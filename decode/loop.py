"""The loop of a decode worker: admit, step, sample, commit, send.

All state changes on the event loop and between steps: what happens meanwhile is
posted to an inbox. Only the engine's own thread computes. With nothing to do the
loop waits for an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from decode.closing import Closer
from decode.commits import Commits
from decode.frames import Beat, Ending, FrameSink, Ready, Row, Step
from decode.opening import Limits
from decode.pacing import NEVER, Pacing
from decode.pressure import Pressure
from decode.request import Phase, Request
from decode.scheduler import Part, Plan, Scheduler
from decode.spans import RequestSpans
from decode.stepper import Failed, Outcome, Stepper
from decode.telemetry import LoopTelemetry
from engine.sampling import Sampled
from mesh.errors import InternalError, MeshError
from mesh.faults import NO_FAULTS, FaultPoints
from mesh.kv.client import KvClient
from mesh.stuck import StuckWatch

BEAT_S = 0.5

log = logging.getLogger(__name__)


class DecodeLoop:
    """Runs the requests that `Admission` hands to it."""

    def __init__(
        self,
        kv: KvClient,
        stepper: Stepper,
        limits: Limits,
        telemetry: LoopTelemetry,
        spans: RequestSpans | None = None,
        faults: FaultPoints = NO_FAULTS,
        pacing: Pacing = NEVER,
        watch: StuckWatch | None = None,
    ) -> None:
        self._faults = faults
        self._pacing = pacing
        self._step_began_s = 0.0
        self.limits = limits
        self.scheduler = Scheduler(limits, kv.take, stepper.draft)
        self.steps = 0
        self._kv = kv
        self._stepper = stepper
        self._telemetry = telemetry
        self._spans = spans
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._watch = watch or StuckWatch()
        self._inbox: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._commits = Commits(kv, self.wake)
        self._closer = Closer(kv, self._commits, self.scheduler, self._ended)
        self._pressure = Pressure(kv, self.scheduler, self._closer, self.wake)
        self._beats: asyncio.Task[None] | None = None
        self._stopping = False
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """One turn after another, until `close`."""
        while not self._stopping:
            self._admit()
            plan = self._plan()
            if not plan.parts:
                await self._idle()
                continue
            outcomes = await self._step(plan.parts)
            rows = self._accept(plan.parts, outcomes)
            self._commits.start()
            self._send(rows)
            await self._pause()
        self._stopped.set()

    # What other coroutines may call.

    @property
    def step_s(self) -> float:
        """What a step took of late."""
        return self._telemetry.step_s

    def post(self, action: Callable[[], None]) -> None:
        """Runs `action` on the event loop between two steps."""
        self._inbox.append(action)
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def add(self, request: Request) -> None:
        """Takes a request on; it joins the steps when its phase says so."""
        request.opened_ns = time.time_ns()
        self.scheduler.add(request)
        self._count()
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat())

    def remove(self, request: Request) -> None:
        """Forgets a request that was refused after all. It holds nothing."""
        self.scheduler.remove(request)
        self._count()
        self._left.set()

    def end(self, request: Request, ending: Ending, error: MeshError | None = None) -> None:
        """Closes a request. To be called between steps, or while it is in no step."""
        self._closer.close(request, ending, error)

    def cancel(self, request: Request, choice: int | None) -> None:
        """Ends a request, or one choice of it. To be called between steps."""
        if choice is None:
            self.end(request, Ending.CANCELLED)
        elif request.forked:
            self._end_choice(request, choice, finished=False)
        else:
            request.dropped.add(choice)
            if len(request.dropped) >= request.opening.n:
                self.end(request, Ending.CANCELLED)

    async def drain(self, within_s: float) -> None:
        """Waits for the requests to finish; what is left after `within_s` is moved."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty()
        except TimeoutError:
            self.post(self._move_all)
            await self._empty()

    async def close(self) -> None:
        """Ends the loop after its present turn, and moves every request that is left."""
        self._stopping = True
        self.wake()
        await self._stopped.wait()
        self._move_all()
        await self._closer.quiet()
        await self._commits.close()
        self._engine.shutdown(wait=True)
        self._stepper.close()

    # The turn.

    def _admit(self) -> None:
        actions, self._inbox = self._inbox, []
        for action in actions:
            action()
        self._commits.apply()
        self._count()

    def _plan(self) -> Plan:
        plan = self.scheduler.plan()
        while plan.starved_pages and self._pressure.relieve(plan.starved_pages):
            plan = self.scheduler.plan()
        if not plan.starved_pages:
            self._pressure.eased()
        return plan

    async def _idle(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    async def _pause(self) -> None:
        since_s = asyncio.get_running_loop().time() - self._step_began_s
        pause_s = self._pacing.pause_s(
            since_s,
            waiting=self.scheduler.in_phase(Phase.HANDING_OVER),
            generating=self.scheduler.in_phase(Phase.RUNNING),
        )
        if pause_s and not self._stopping:
            await asyncio.sleep(pause_s)

    async def _step(self, parts: Sequence[Part]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        started = self._step_began_s = loop.time()
        with self._watch.over("a step"):
            await self._faults.delay("step")
            outcomes = await loop.run_in_executor(self._engine, self._stepper.run, parts)
        self.steps += 1
        self._telemetry.stepped(loop.time() - started, sum(part.rows for part in parts))
        return outcomes

    def _accept(self, parts: Sequence[Part], outcomes: Sequence[Outcome]) -> list[tuple[FrameSink, Row]]:
        rows: list[tuple[FrameSink, Row]] = []
        now_ns = time.time_ns()
        for part, outcome in zip(parts, outcomes, strict=True):
            request = part.request
            request.last_step_ns = now_ns
            if request.phase is Phase.CLOSING or request.spoilt:
                continue
            if isinstance(outcome, Failed):
                log.warning("request %s fails alone: %s", request.opening.request_id, outcome.message)
                self.end(request, Ending.FAILED, InternalError(outcome.message, code=outcome.code))
                continue
            rows.extend((request.session, row) for row in self._advance(part, outcome))
        return rows

    def _advance(self, part: Part, samples: list[Sampled]) -> list[Row]:
        """Applies what a step computed for one part; returns the rows it gives."""
        request, page_tokens = part.request, self.limits.page_tokens
        if not request.forked:
            request.computed_prompt_tokens += part.count
        part.choice.computed += part.count
        rows = self._append(part, samples) if part.samples else []
        for choice in request.choices:
            self._commits.queue(request, choice.complete_blocks(page_tokens))
        if not request.forked:
            request.skip_leased(page_tokens)
        self._announce(request)
        if rows and not request.first_token_ns:
            request.first_token_ns = time.time_ns()
        self._telemetry.generated(sum(len(row.token_ids) for row in rows))
        for row in rows:
            if row.finish is not None:
                self._end_choice(request, row.choice, finished=True)
        return rows

    def _append(self, part: Part, samples: list[Sampled]) -> list[Row]:
        request, context = part.request, self.limits.context_length
        scored = tuple(request.scored) if request.scoring else ()
        if not request.forked:
            # Every choice shares the blocks that the prompt has filled.
            self._commits.queue(request, part.choice.complete_blocks(self.limits.page_tokens))
            request.fork(part.fork, self.limits.page_tokens)
            first = request.opening.first_choice
            for index in request.dropped:
                self._end_choice(request, index, finished=False)
            if request.opening.n > 1:
                rows = [
                    c.accept([samples[c.index - first]], (), request.opening, context)
                    for c in request.choices
                ]
                return [replace(row, prompt_logprobs=scored) for row in rows] if scored else rows
        row = part.choice.accept(samples, part.drafts, request.opening, context)
        return [replace(row, prompt_logprobs=scored) if scored else row]

    def _end_choice(self, request: Request, index: int, *, finished: bool) -> None:
        choice = next((c for c in request.choices if c.index == index), None)
        if choice is None or request.phase is not Phase.RUNNING:
            return
        request.finished += finished
        self._kv.give(request.end_choice(choice))
        if not request.choices:
            self.end(request, Ending.FINISHED if request.finished else Ending.CANCELLED)

    def _announce(self, request: Request) -> None:
        """Tells the router once that a prompt which this worker computed is here."""
        whole = request.opening.prefix_blocks * self.limits.page_tokens
        if not request.ready_sent and request.choices and request.choices[0].computed >= whole:
            request.ready_sent = True
            request.ready_ns = time.time_ns()
            request.session.send(Ready(request.handoff_id))
            if request.handover is not None:
                request.handover.stop_following()

    def _send(self, rows: Sequence[tuple[FrameSink, Row]]) -> None:
        by_session: dict[FrameSink, list[Row]] = {}
        for session, row in rows:
            by_session.setdefault(session, []).append(row)
        for session, mine in by_session.items():
            session.send(Step(tuple(mine)))

    # Beside the turn.

    async def _empty(self) -> None:
        while len(self.scheduler):
            self._left.clear()
            await self._left.wait()

    def _move_all(self) -> None:
        for request in self.scheduler:
            self.end(request, Ending.MOVED)

    def _ended(self, request: Request, ending: Ending) -> None:
        self._telemetry.ended(ending, request.computed_prompt_tokens)
        if request.cancelled_ns:
            self._telemetry.cancelled(max(0, request.last_step_ns - request.cancelled_ns) / 1e9)
        if self._spans is not None:
            self._spans.record(request, ending)
        self._count()
        self._left.set()
        self.wake()

    def _count(self) -> None:
        running = self.scheduler.in_phase(Phase.RUNNING)
        self._telemetry.requests(running=running, waiting=len(self.scheduler) - running)

    async def _beat(self) -> None:
        """Twice a second while there is work, to every session that has some."""
        while len(self.scheduler):
            running = self.scheduler.in_phase(Phase.RUNNING)
            beat = Beat(self.steps, running, len(self.scheduler) - running)
            for session in {request.session for request in self.scheduler}:
                session.send(beat)
            await asyncio.sleep(BEAT_S)
        self._beats = None
