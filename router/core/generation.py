"""One prompt, from the queue to its last token: place, reserve, fetch, follow, and again.

One path serves a new request, a full prefix hit, a preempted request and one whose
worker died: place prompt + generated tokens, reserve at the decode worker, let a
prefill worker compute the whole blocks that are missing, follow the tokens. A
request whose choices have begun is continued choice by choice. It does not know
faces, nor how workers are told apart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from mesh.blocks import PAGE_TOKENS, chain, root_id
from mesh.errors import InternalError, MeshError, Unavailable
from router import wire
from router.admission import Need
from router.core import phases as phase
from router.core.choice import Choice
from router.core.floor import Floor, Origin
from router.core.handoff import CREDIT_TOKENS, Event, Handoff, Lost, PrefillFailed
from router.core.request import Ask, Delta
from router.placement import Worker
from router.prefill_runs import Fault, PrefillRun, RunFailure

log = logging.getLogger(__name__)

DEATHS_MAX = 3
PREFILL_ATTEMPTS = 2
NO_STORE_S = 15.0
CAPABILITY_TTL_S = 600.0


class Generation:
    """`run` returns when every choice has ended; it raises the one error otherwise.

    `ask` has been checked: it has a seed and max_tokens. `emit` gets deltas;
    `on_reserved(tokens)` the cached tokens of the first placement;
    `on_placed_anew(why, tokens)` that it goes on elsewhere, and what is computed a second time.
    """

    def __init__(
        self,
        floor: Floor,
        origin: Origin,
        ask: Ask,
        prompt: list[int],
        choices: Sequence[Choice],
        *,
        emit: Callable[[Delta], None],
        on_reserved: Callable[[int], None],
        enter: Callable[[str], None],
        on_placed_anew: Callable[[str, int], None] = lambda why, recomputed: None,
    ) -> None:
        self._floor = floor
        self._origin = origin
        self._ask = ask
        self._prompt = prompt
        self._choices = list(choices)
        self._emit = emit
        self._on_reserved = on_reserved
        self._enter = enter
        self._on_placed_anew = on_placed_anew
        # By choice: why it is placed again.
        self._torn: dict[int, str] = {}
        self._handoffs: dict[int, Handoff] = {}
        self._accepted = False
        # By choice: the loss of one worker is one loss to each choice that was there.
        self._deaths: Counter[int] = Counter()
        self._attempt = 0
        self._queued_at = time.monotonic()
        self._no_store_at: float | None = None
        self._ids: dict[tuple[bytes, int, int], tuple[bytes, list[bytes]]] = {}
        # Under it the blocks of a scored prompt have ids that nobody else has.
        self._own_salt = secrets.token_bytes(32)

    async def run(self) -> None:
        """Drives all choices. Cancelling it cancels the work everywhere."""
        await self._drive(self._choices)

    def taken(self, index: int, tokens: int) -> None:
        """The face has read tokens of a choice: its worker gets credit."""
        handoff = self._handoffs.get(index)
        if handoff is not None:
            handoff.taken(index, tokens)

    async def _drive(self, choices: list[Choice]) -> None:
        while choices:
            await self._place(choices)
            choices = [choice for choice in choices if not choice.ended]
            begun = any(choice.tokens for choice in choices)
            if len(choices) > 1 and (begun or len(choices) < self._ask.n):
                await self._apart(choices)
                return

    async def _apart(self, choices: Sequence[Choice]) -> None:
        """Choices that have begun differ: each continues alone."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._drive([choice]))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _place(self, choices: Sequence[Choice]) -> None:
        """One placement, to its end. Returns with choices open if they are to be placed again."""
        self._enter(phase.QUEUE)
        await self._floor.faults.delay("queued")
        tokens = [*self._prompt, *choices[0].tokens] if len(choices) == 1 else self._prompt
        seat = await self._floor.admission.enter(
            Need(
                model=self._ask.model,
                arrival_ns=self._origin.arrival_ns,
                sequences=len(choices),
                blocks=_whole_blocks(len(tokens)),
                held=lambda worker: self._held(worker, choices, tokens),
                accepted=self._accepted,
                queued_at=self._queued_at,
            )
        )
        self._enter(phase.PLACE)
        try:
            session = self._floor.fleet.session(seat.worker.name)
            opening = self._opening(seat.worker, choices, tokens)
        except Unavailable as error:
            seat.leave()
            self._died(error.message, choices)
            return
        except BaseException:
            seat.leave()
            raise
        handoff = Handoff(opening, choices, session, seat, self._emit, self._floor.faults)
        for choice in choices:
            self._handoffs[choice.index] = handoff
        try:
            handoff.open()
        except Unavailable as error:
            self._died(error.message, choices)
            return
        try:
            await self._follow(handoff, seat.worker, choices, tokens)
        finally:
            handoff.cancel()

    async def _follow(
        self, handoff: Handoff, worker: Worker, choices: Sequence[Choice], tokens: Sequence[int]
    ) -> None:
        event = await handoff.events.get()
        if isinstance(event, wire.Reserved):
            self._reserved(event, choices, len(tokens))
            missing = 0 if event.alone else len(handoff.opening.block_ids) - event.have
            self._enter(phase.PREFILL)
            if missing and handoff.opening.prompt_logprobs is not None:
                # Prefill workers hold no output matrix: who scores a prompt computes it.
                handoff.sources(handoff.opening.attempt, wire.Sources())
                missing = 0
            event = await (self._fetch(handoff, worker, event.have) if missing else handoff.events.get())
            while isinstance(event, (PrefillFailed, wire.Reserved)):
                # The store went away: the worker goes on alone, whatever becomes of its sources.
                event = await handoff.events.get()
        if isinstance(event, wire.Ready):
            self._enter(phase.HANDOVER)
            self._enter(phase.FIRST_STEP)
            event = await handoff.events.get()
        while isinstance(event, (PrefillFailed, wire.Reserved, wire.Ready)):
            event = await handoff.events.get()
        if all(choice.ended for choice in choices):
            return
        if isinstance(event, Lost):
            self._died(event.reason, choices)
        elif isinstance(event, wire.Refused):
            self._refused(event, worker)
        else:
            self._done(event, choices)

    async def _fetch(self, handoff: Handoff, worker: Worker, have: int) -> Event:
        """Gets the missing blocks made, by a prefill worker or by the decode worker itself.

        Returns the next event of the placement: ready, its end, or that the worker goes on alone.
        """
        placement = self._floor.fleet.placement
        attempt = handoff.opening.attempt
        tried: list[str] = []
        while len(tried) < PREFILL_ATTEMPTS:
            prefill = placement.choose_prefill(worker, tried)
            if prefill is None:
                break
            tried.append(prefill.name)
            placement.taken(prefill, 1)
            try:
                event = await self._fetch_from(handoff, prefill, worker, attempt, have)
            finally:
                placement.ended(prefill, 1)
            if not isinstance(event, PrefillFailed):
                return event
            self._floor.fleet.prefill_failed(prefill.name, event.failure)
            self._attempt += 1
            attempt = self._attempt
            self._enter(phase.PREFILL)
        handoff.sources(attempt, wire.Sources())
        return await handoff.events.get()

    async def _fetch_from(
        self, handoff: Handoff, prefill: Worker, decode: Worker, attempt: int, have: int
    ) -> Event:
        fleet, elsewhere = self._floor.fleet, prefill.node != decode.node
        try:
            channel = fleet.prefill_channel(prefill.name)
            sources = wire.Sources(prefill_worker=prefill.name)
            if elsewhere:
                sources = wire.Sources(pull_address=fleet.store_address(prefill.node))
        except Unavailable as error:
            return PrefillFailed(attempt, RunFailure(error.message, Fault.LOST))
        handoff.sources(attempt, sources)
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        handing_over = False

        def hands_over() -> None:
            nonlocal handing_over
            if not handing_over:
                handing_over = True
                self._floor.faults.at("handing_over")

        def fail(failure: RunFailure) -> None:
            handoff.events.put_nowait(PrefillFailed(attempt, failure))

        def complete() -> None:
            self._enter(phase.HANDOVER)
            hands_over()
            late = RunFailure("blocks were not handed over", Fault.REQUEST)
            patience_s = self._floor.transfer_s if elsewhere else self._floor.handover_s
            timers.append(loop.call_later(patience_s, fail, late))

        run = PrefillRun(
            channel,
            wire.run_request(handoff.opening, attempt, have, PAGE_TOKENS, reserves=elsewhere),
            self._floor.run_patience,
            self._floor.pulse,
            on_complete=complete,
            on_failure=fail,
            faults=self._floor.faults,
        )
        try:
            while True:
                event = await handoff.events.get()
                if not isinstance(event, PrefillFailed) or event.attempt == attempt:
                    if isinstance(event, wire.Ready):
                        # On one node decode often has its leases before the run says that it is done.
                        hands_over()
                    return event
        finally:
            for timer in timers:
                timer.cancel()
            run.end()

    def _reserved(self, event: wire.Reserved, choices: Sequence[Choice], tokens: int) -> None:
        self._no_store_at = None
        for choice in choices:
            why = self._torn.pop(choice.index, None)
            if why is not None:
                # Everything but the last token had been computed, if generation had begun.
                again = max(0, tokens - 1 - event.have * PAGE_TOKENS) if choice.tokens else 0
                self._on_placed_anew(why, again)
        if not self._accepted:
            self._accepted = True
            self._on_reserved(event.have * PAGE_TOKENS)

    def _refused(self, event: wire.Refused, worker: Worker) -> None:
        """Returns if the request is to queue again."""
        if event.reason == "invalid":
            raise event.error
        if event.reason == "draining":
            worker.draining = True
        if event.reason == "no_store":
            now = time.monotonic()
            self._no_store_at = self._no_store_at or now
            if now - self._no_store_at > NO_STORE_S:
                raise Unavailable("The KV store cannot be reached. Try again.", retry_after_s=2.0)

    def _done(self, event: wire.Done, choices: Sequence[Choice]) -> None:
        """Returns if the open choices are to be placed again."""
        if event.ending in ("preempted", "moved"):
            self._torn.update((choice.index, event.ending) for choice in choices)
            return
        if event.ending == "cancelled":
            self._died("the worker cancelled the request", choices)
            return
        log.warning("request failed at its worker", extra={"ending": event.ending})
        raise event.error or InternalError("The worker failed on this request.")

    def _died(self, reason: str, choices: Sequence[Choice]) -> None:
        """Counts a loss; raises once there were too many."""
        self._deaths.update(choice.index for choice in choices)
        self._torn.update((choice.index, "lost") for choice in choices)
        deaths = max(self._deaths[choice.index] for choice in choices)
        log.warning(
            "request lost its worker",
            extra={"request_id": self._origin.request_id, "reason": reason, "deaths": deaths},
        )
        if deaths > DEATHS_MAX:
            raise Unavailable(
                "The workers that ran this request were lost too often.",
                code="worker_lost",
                retry_after_s=2.0,
            )

    def _held(self, worker: Worker, choices: Sequence[Choice], tokens: Sequence[int]) -> int:
        _, ids = self._block_ids(worker.fingerprint, choices, tokens)
        return self._floor.fleet.prefixes.held(worker.node, ids)

    def _block_ids(
        self, fingerprint: bytes, choices: Sequence[Choice], tokens: Sequence[int]
    ) -> tuple[bytes, list[bytes]]:
        """Root and ids of the whole blocks before the tail."""
        key = (fingerprint, choices[0].index, len(tokens))
        known = self._ids.get(key)
        if known is None:
            salt = self._own_salt if self._scoring(choices) is not None else self._origin.salt
            root = root_id(salt, fingerprint)
            whole = tokens[: _whole_blocks(len(tokens)) * PAGE_TOKENS]
            known = (root, chain(root, whole, PAGE_TOKENS))
            self._ids = {key: known}
        return known

    def _scoring(self, choices: Sequence[Choice]) -> int | None:
        """Alternatives per prompt token; None where no scores are wanted any more."""
        return None if choices[0].tokens else self._ask.prompt_logprobs

    def _opening(self, worker: Worker, choices: Sequence[Choice], tokens: Sequence[int]) -> wire.Opening:
        ask, origin = self._ask, self._origin
        root, ids = self._block_ids(worker.fingerprint, choices, tokens)
        handoff_id = f"{origin.request_id}/{self._floor.name}.{next(self._floor.placements)}"
        self._attempt += 1
        claims = {
            "org": origin.organisation,
            "handoff": handoff_id,
            "last_block": ids[-1].hex() if ids else "",
            "model": ask.model,
            "request_id": origin.request_id,
        }
        stops = set(ask.stopping.stop_token_ids) | (
            frozenset() if ask.stopping.ignore_eos else origin.end_ids
        )
        return wire.Opening(
            request_id=origin.request_id,
            handoff_id=handoff_id,
            attempt=self._attempt,
            capability=self._floor.mint(claims),
            tokens=tokens,
            generated=len(tokens) - len(self._prompt),
            block_ids=ids,
            root_id=root,
            n=len(choices),
            first_choice=choices[0].index - self._choices[0].index,
            sampling=ask.sampling,
            max_tokens=ask.stopping.max_tokens or 1,
            min_tokens=ask.stopping.min_tokens,
            stop_ids=sorted(stops),
            ignore_eos=ask.stopping.ignore_eos,
            arrival_ns=origin.arrival_ns,
            credit=CREDIT_TOKENS,
            metadata={key: value for key, value in ask.metadata.items() if key.startswith("script_")},
            traceparent=origin.traceparent,
            grammar=ask.grammar,
            prompt_logprobs=self._scoring(choices),
        )


def _whole_blocks(tokens: int) -> int:
    """Blocks that come from caches and prefill; the rest, 1 to P tokens, is the decode worker's."""
    return (tokens - 1) // PAGE_TOKENS


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that is worth telling."""
    leaves = [first_error(e) if isinstance(e, BaseExceptionGroup) else e for e in errors.exceptions]
    return next((error for error in leaves if isinstance(error, MeshError)), leaves[0])
