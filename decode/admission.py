"""What a router's frames do: open, sources, cancel, credit, and a session that ends.

Takes a request or refuses it at once, brings its prompt here, and hands it to
the loop. Everything that touches a request in a step is posted to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from decode.alone import Alone
from decode.frames import Ending, Ready, Refusal, Refused, Reserved, SourcesFailed
from decode.grammars import WorkerGrammars
from decode.handover import Handover
from decode.loop import DecodeLoop
from decode.opening import Opening, check, check_chain
from decode.request import Phase, Request
from decode.session import RouterSession
from mesh.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    MeshError,
    NotFound,
    OutOfPages,
    Overloaded,
    StaleHandle,
    Unavailable,
    Unimplemented,
)
from mesh.kv.client import KvClient
from mesh.kv.page import Drawn, Page

# Longer prompts are hashed in a thread, so that the loop is not held up.
INLINE_TOKENS = 4096
BUSY_RETRY_S = 0.5

log = logging.getLogger(__name__)

Verify = Callable[[Opening], None]


class Admission:
    """`verify` checks a request's capability and raises a MeshError. `draining` refuses what is new."""

    def __init__(
        self, kv: KvClient, loop: DecodeLoop, verify: Verify, grammars: WorkerGrammars | None = None
    ) -> None:
        self.draining = False
        self._kv = kv
        self._loop = loop
        self._verify = verify
        self._grammars = grammars
        self._page_tokens = loop.limits.page_tokens
        self._alone = Alone(kv, loop.scheduler, self._page_tokens, lambda: loop.step_s, self._goes_alone)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, opening: Opening, session: RouterSession) -> None:
        """Answers with `reserved` or `refused`, soon."""
        refusal = self._refusal(opening)
        if refusal is not None:
            reason, error = refusal
            session.send(Refused(opening.handoff_id, reason, error))
            return
        request = Request(opening, session, opening.attempt)
        handover = Handover(self._kv, self, request, self._page_tokens)
        request.handover = handover
        self._loop.add(request)
        task = asyncio.create_task(self._take(request, handover))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def sources(
        self, session: RouterSession, handoff_id: str, attempt: int, *, itself: bool, pull_address: str = ""
    ) -> None:
        """Where the missing blocks come from. An older attempt than one heard of is ignored."""
        request = self._of(session, handoff_id)
        if request is None or request.phase is not Phase.HANDING_OVER or attempt < request.attempt:
            return
        request.attempt = attempt
        handover = request.handover
        assert isinstance(handover, Handover)
        if pull_address:
            handover.pull(pull_address)
            return
        handover.stop_pulling()
        if itself:
            handover.draw()

    def cancel(self, session: RouterSession, handoff_id: str, choice: int | None) -> None:
        request = self._of(session, handoff_id)
        if request is not None:
            if choice is None:
                request.cancelled_ns = request.cancelled_ns or time.time_ns()
            self._loop.post(lambda: self._loop.cancel(request, choice))

    def credit(self, session: RouterSession, handoff_id: str, tokens: int) -> None:
        request = self._of(session, handoff_id)
        if request is not None:
            self._loop.post(lambda: request.add_credit(tokens))

    def leave(self, session: RouterSession) -> None:
        """The session broke: everything in it is cancelled."""
        for request in self._loop.scheduler:
            if request.session is session:
                self.cancel(session, request.handoff_id, None)

    def _of(self, session: RouterSession, handoff_id: str) -> Request | None:
        """A request by its id, but only to the session that opened it."""
        request = self._loop.scheduler.get(handoff_id)
        return request if request is not None and request.session is session else None

    # What a hand-over reports.

    def arrived(self, request: Request, blocks: Sequence[tuple[int, Page]]) -> None:
        if request.phase is Phase.RUNNING:
            self._loop.post(lambda: request.arrived(blocks, self._page_tokens))
            return
        if request.phase is Phase.HANDING_OVER:
            request.arrived(blocks, self._page_tokens)
            if request.missing_blocks == 0:
                self._begin(request)

    def drawn(self, request: Request, drawn: Drawn) -> None:
        if request.phase is Phase.HANDING_OVER:
            request.arrived(drawn.committed, self._page_tokens)
            writable = {i: page for i, page in drawn.writable if request.prefix[i] is None}
            self._begin(request, writable, request.attempt)

    def failed(self, request: Request, error: MeshError) -> None:
        if isinstance(error, (NotFound, StaleHandle)):
            # The store has lost the reservation: nothing is wrong with the request.
            self._loop.post(lambda: self._loop.end(request, Ending.PREEMPTED))
        else:
            self._loop.post(lambda: self._loop.end(request, Ending.FAILED, error))

    def source_failed(self, request: Request, attempt: int, error: MeshError) -> None:
        """The router knows other sources; what has arrived stays."""
        log.info("the blocks of %s do not come: %s", request.handoff_id, error)
        if request.phase is Phase.HANDING_OVER and attempt == request.attempt:
            request.session.send(SourcesFailed(request.handoff_id, attempt, error))

    def store_away(self) -> None:
        """The session with the store broke."""
        self._alone.went_away()

    def lost(self, handoff_id: str) -> None:
        """The store could not keep its leases: no page of the request may be used for an answer."""
        request = self._loop.scheduler.get(handoff_id)
        if request is not None:
            request.spoilt = True
            self._loop.post(lambda: self._loop.end(request, Ending.PREEMPTED))

    # Taking a request.

    def _refusal(self, opening: Opening) -> tuple[Refusal, MeshError] | None:
        if self.draining:
            return Refusal.DRAINING, Unavailable("the worker drains")
        if self._loop.scheduler.get(opening.handoff_id) is not None:
            return Refusal.INVALID, Conflict("this handoff is open already")
        try:
            check(opening, self._loop.limits)
            self._verify(opening)
        except MeshError as error:
            return Refusal.INVALID, error
        if self._loop.scheduler.sequences + opening.n > self._loop.limits.max_seqs:
            busy = Overloaded("the worker runs as many sequences as it can", retry_after_s=BUSY_RETRY_S)
            return Refusal.BUSY, busy
        return None

    async def _take(self, request: Request, handover: Handover) -> None:
        opening = request.opening
        try:
            await self._check_chain(opening)
            if opening.grammar:
                if self._grammars is None:
                    raise Unimplemented("this worker knows no grammars", param="grammar")
                request.matcher = await self._grammars.matcher(opening)
            if request.closing:
                # Cancelled meanwhile: nothing was taken for it, and nothing may be.
                return
            await self._reserve(request, handover)
        except MeshError as error:
            self._refuse(request, error)
            return
        except Exception:
            log.exception("request %s could not be taken", opening.request_id)
            self._refuse(request, InternalError("the request could not be taken"))
            return

    async def _reserve(self, request: Request, handover: Handover) -> None:
        """Reserves at the store; while that is away, begins without it."""
        try:
            await handover.reserve()
        except Unavailable:
            if await self._alone.back_soon():
                await handover.reserve()
            elif request.closing or self._alone.take_on(request):
                return
            else:
                raise
        self._reserved(request, handover)

    def _goes_alone(self, request: Request) -> None:
        have = request.opening.prefix_blocks - request.missing_blocks
        request.session.send(Reserved(request.handoff_id, have, alone=True))
        assert isinstance(request.handover, Handover)
        request.handover.give_up()
        self._begun(request)

    def _reserved(self, request: Request, handover: Handover) -> None:
        if request.closing:
            return
        have = request.opening.prefix_blocks - request.missing_blocks
        request.session.send(Reserved(request.handoff_id, have))
        if request.missing_blocks == 0:
            self._begin(request)
        else:
            handover.follow()

    async def _check_chain(self, opening: Opening) -> None:
        if len(opening.tokens) > INLINE_TOKENS:
            await asyncio.to_thread(check_chain, opening, self._page_tokens)
        else:
            check_chain(opening, self._page_tokens)

    def _refuse(self, request: Request, error: MeshError) -> None:
        if request.closing:
            return
        self._loop.remove(request)
        reason = Refusal.INVALID
        if isinstance(error, OutOfPages):
            reason = Refusal.NO_PAGES
        elif isinstance(error, Unavailable):
            reason = Refusal.NO_STORE
        elif not isinstance(error, (InvalidRequest, Conflict, Unimplemented)):
            log.warning("request %s refused: %s", request.opening.request_id, error)
        request.session.send(Refused(request.handoff_id, reason, error))

    def _begin(self, request: Request, drawn: Mapping[int, Page] | None = None, attempt: int = 0) -> None:
        request.begin(self._page_tokens, drawn or {}, attempt)
        self._begun(request)

    def _begun(self, request: Request) -> None:
        if not request.computes_prefix:
            request.ready_sent = True
            request.ready_ns = time.time_ns()
            request.session.send(Ready(request.handoff_id))
            if request.handover is not None:
                request.handover.stop_following()
        self._loop.wake()
