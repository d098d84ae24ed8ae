"""Whose chunk comes next, and how long it is. Pure: the caller brings the times.

Runs queue by arrival. A few of the oldest are active; of these the one with the least
left to compute goes first, which makes the mean wait for a first token the shortest that
there is, and every few chunks the one that has waited longest, so that none is
postponed for ever. A chunk takes about `TARGET_S`, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prefill.run import Run

ACTIVE_RUNS = 4
# Every so many chunks one is for whoever has waited longest.
PATIENT_TURN = 4
TARGET_S = 0.1
FIRST_TOKENS = 64
MOST_TOKENS = 2048
# How much of the newest measurement goes into the estimate.
FRESH_SHARE = 0.5


class Queue:
    """The runs of the worker."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs))

    def add(self, run: Run) -> None:
        self._runs.append(run)
        self._runs.sort(key=lambda r: r.arrival)

    def remove(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    def next(self, but: Collection[Run] = ()) -> Run | None:
        """Of the active runs the one with the least left, or in its turn the one that has waited longest.

        None of those in `but`: they have a turn already.
        """
        active = [run for run in self._runs[:ACTIVE_RUNS] if run not in but]
        if not active:
            return None
        self._turn += 1
        if self._turn % PATIENT_TURN:
            run = min(active, key=lambda r: r.missing_blocks)
        else:
            run = min(active, key=lambda r: r.last_turn)
        run.last_turn = self._turn
        return run


class Pace:
    """Learns from past chunks how many tokens fit into `TARGET_S`."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._tokens = max(FIRST_TOKENS, page_tokens)
        self._token_s: float | None = None

    @property
    def blocks(self) -> int:
        """Blocks of the next chunk, at least one."""
        return max(1, self._tokens // self._page_tokens)

    def measured(self, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` took `seconds`."""
        token_s = max(seconds, 1e-6) / tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += FRESH_SHARE * (token_s - self._token_s)
        # One lucky measurement of a short chunk must not make a very long one.
        self._tokens = min(int(TARGET_S / self._token_s), 2 * self._tokens, MOST_TOKENS)
        self._tokens = max(self._tokens, self._page_tokens)
