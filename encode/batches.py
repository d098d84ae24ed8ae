"""What waits is computed together: sequences of all calls, call by call in turn.

One step takes as many sequences as fit into `step_tokens`, one of each call after the
other, so that a long list does not keep short ones waiting. A call that its caller leaves
takes what is not computed yet with it. Nothing runs while nothing waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from encode.bert import Rows
from mesh.errors import InternalError, Overloaded

Embed = Callable[[Sequence[Sequence[int]]], Rows]


@dataclass(slots=True, eq=False)
class _Call:
    """`waiting` are places in `sequences` that are not computed yet."""

    sequences: Sequence[Sequence[int]]
    done: asyncio.Future[None]
    waiting: deque[int] = field(default_factory=deque)
    vectors: dict[int, Rows] = field(default_factory=dict)


class Batches:
    """`embed` blocks, on a thread of its own. `on_step(sequences, tokens, seconds)` after each step."""

    def __init__(
        self,
        embed: Embed,
        *,
        step_tokens: int,
        waiting_tokens: int,
        on_step: Callable[[int, int, float], None] = lambda sequences, tokens, seconds: None,
    ) -> None:
        self._embed = embed
        self._step_tokens = step_tokens
        self._waiting_limit = waiting_tokens
        self._on_step = on_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._calls: deque[_Call] = deque()
        self._wake = asyncio.Event()
        self.waiting_tokens = 0

    @property
    def calls(self) -> int:
        """Calls that wait for vectors."""
        return len(self._calls)

    async def embed(self, sequences: Sequence[Sequence[int]]) -> Rows:
        """One vector for each. Raises Overloaded when too much waits, InternalError if a step fails."""
        tokens = sum(map(len, sequences))
        if self.waiting_tokens and self.waiting_tokens + tokens > self._waiting_limit:
            raise Overloaded("Too many texts are waiting for this model. Try again.", retry_after_s=1.0)
        call = _Call(sequences, asyncio.get_running_loop().create_future(), deque(range(len(sequences))))
        self.waiting_tokens += tokens
        self._calls.append(call)
        self._wake.set()
        try:
            await call.done
            return np.stack([call.vectors[place] for place in range(len(sequences))])
        finally:
            self.waiting_tokens -= sum(len(sequences[place]) for place in call.waiting)
            call.waiting.clear()
            if call in self._calls:
                self._calls.remove(call)

    async def run(self) -> None:
        """One step after another, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = self._next()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            sequences = [call.sequences[place] for call, place in batch]
            started = loop.time()
            try:
                vectors = await loop.run_in_executor(self._thread, self._embed, sequences)
            except Exception as error:
                self._failed({call for call, _ in batch}, error)
                continue
            self._on_step(len(batch), sum(map(len, sequences)), loop.time() - started)
            for (call, place), vector in zip(batch, vectors, strict=True):
                call.vectors[place] = vector
                if len(call.vectors) == len(call.sequences) and not call.done.done():
                    call.done.set_result(None)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _next(self) -> list[tuple[_Call, int]]:
        """The sequences of the next step: at least one, if any waits."""
        batch: list[tuple[_Call, int]] = []
        room = self._step_tokens
        turns = deque(call for call in self._calls if call.waiting)
        while turns:
            call = turns.popleft()
            size = len(call.sequences[call.waiting[0]])
            if batch and size > room:
                break
            batch.append((call, call.waiting.popleft()))
            room -= size
            self.waiting_tokens -= size
            if call.waiting:
                turns.append(call)
        if self._calls:
            # Whose turn it was first is last next time.
            self._calls.rotate(-1)
        return batch

    @staticmethod
    def _failed(calls: set[_Call], error: Exception) -> None:
        for call in calls:
            if not call.done.done():
                failure = InternalError("The model failed on these texts.", code="step_failed")
                failure.__cause__ = error
                call.done.set_exception(failure)
