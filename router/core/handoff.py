"""One placement of a request at one decode worker, as its session sees it.

Turns rows into deltas as they arrive, passes everything else to whoever follows the
placement, hands out credit as the face reads, and leaves the worker's seat when the
worker has said its last word. It does not know why a request is placed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.errors import Unavailable
from mesh.faults import NO_FAULTS, FaultPoints
from router import wire
from router.admission import Seat
from router.core.choice import Choice, Row
from router.core.request import Delta
from router.prefill_runs import Fault, RunFailure
from router.sessions import DecodeSession

# Tokens per choice that may be under way to a face that does not read.
CREDIT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker died, hung or left."""

    reason: str


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prefill run of an attempt will not deliver."""

    attempt: int
    failure: RunFailure


Event = wire.Reserved | wire.Refused | wire.Ready | wire.Done | Lost | PrefillFailed


class Handoff:
    """`choices[i]` is the worker's choice `opening.first_choice + i`."""

    def __init__(
        self,
        opening: wire.Opening,
        choices: Sequence[Choice],
        session: DecodeSession,
        seat: Seat,
        emit: Callable[[Delta], None],
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self.opening = opening
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._choices = {opening.first_choice + place: choice for place, choice in enumerate(choices)}
        self._taken = {choice.index: 0 for choice in choices}
        self._granted = CREDIT_TOKENS
        self._session = session
        self._seat = seat
        self._emit = emit
        self._faults = faults

    def open(self) -> None:
        """Sends the request; raises Unavailable, and then the seat is free."""
        try:
            self._session.open(self.opening, self)
        except BaseException:
            self._seat.leave()
            raise

    def sources(self, attempt: int, sources: wire.Sources) -> None:
        self._session.sources(self.opening.handoff_id, attempt, sources)

    def cancel(self) -> None:
        """Tells the worker to stop, unless it has already."""
        if self._session.holds(self.opening.handoff_id):
            self._session.cancel(self.opening.handoff_id)

    def taken(self, index: int, tokens: int) -> None:
        """The face has read this much of a choice."""
        if index not in self._taken:
            return
        self._taken[index] += tokens
        open_ = [self._taken[c.index] for c in self._choices.values() if not c.ended]
        if not open_:
            return
        more = min(open_) + CREDIT_TOKENS - self._granted
        if more >= CREDIT_TOKENS // 2:
            self._granted += more
            self._session.credit(self.opening.handoff_id, more)

    # Called by the session.

    def on_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            choice = self._choices.get(row.choice)
            if choice is None:
                continue
            self._faults.at("streaming" if choice.tokens else "first_token")
            delta = choice.push(row)
            if delta is None:
                continue
            self._emit(delta)
            if choice.ended and row.finish is None:
                # A stop string: the worker does not know it.
                self._session.cancel(self.opening.handoff_id, row.choice)

    def on_frame(
        self, frame: wire.Reserved | wire.Refused | wire.Ready | wire.SourcesFailed | wire.Done
    ) -> None:
        if isinstance(frame, wire.SourcesFailed):
            fault = Fault.LOST if isinstance(frame.error, Unavailable) else Fault.REQUEST
            failure = RunFailure(f"its pages do not come: {frame.error.message}", fault)
            self.events.put_nowait(PrefillFailed(frame.attempt, failure))
            return
        if isinstance(frame, wire.Refused):
            self._seat.leave(refused=frame.reason in ("no_pages", "busy", "no_store"))
        elif isinstance(frame, wire.Done):
            self._seat.leave()
        elif isinstance(frame, wire.Reserved):
            self._seat.accepted()
        self.events.put_nowait(frame)

    def on_lost(self, reason: str) -> None:
        self._seat.leave()
        self.events.put_nowait(Lost(reason))
