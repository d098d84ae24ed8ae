"""Holds a generated sequence to a grammar: which tokens may come next, and when it is complete.

What a matcher may cost is bounded: each step by the compiler's own limits, all of them together by a budget
of processor time. Knows neither logits nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Allowed = NDArray[np.bool_]

# A step of an ordinary grammar takes tens of microseconds. What takes more than this is counted.
FREE_S = 0.002
BUDGET_S = 0.1


class Matcher:
    """One sequence's. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._spent_s = 0.0

    @property
    def complete(self) -> bool:
        """Nothing more may come."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why it can go no further; the grammar is to blame."""
        if self._matcher.is_error():
            return "the grammar became too complex"
        if self._spent_s > BUDGET_S:
            return "the grammar takes too long"
        return None

    def copy(self) -> Matcher:
        """The same state, to go on from on its own."""
        copied = Matcher(self._matcher.deep_copy(), self._vocab_size)
        copied._spent_s = self._spent_s
        return copied

    def take(self, tokens: Sequence[int]) -> bool:
        """Goes on by tokens that were generated; false if the grammar does not allow them."""
        started = time.thread_time()
        taken = self._matcher.consume_tokens(list(tokens))
        self._spend(time.thread_time() - started)
        return bool(taken)

    def allowed(self, drafts: Sequence[int] = ()) -> list[Allowed]:
        """What may come next, and what after each draft up to the first that may not. [vocab_size] each.

        End tokens are allowed where the text so far satisfies the grammar. Releases the interpreter lock.
        """
        started = time.thread_time()
        masks = [self._mask()]
        taken = 0
        for draft in drafts:
            if self._matcher.is_stopped() or not self._matcher.validate_tokens([draft]):
                break
            self._matcher.consume_token(draft)
            taken += 1
            masks.append(self._mask())
        if taken:
            self._matcher.rollback(taken)
        self._spend(time.thread_time() - started)
        return masks

    def _mask(self) -> Allowed:
        words = np.zeros((self._vocab_size + 31) // 32, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def _spend(self, seconds: float) -> None:
        self._spent_s += max(0.0, seconds - FREE_S)
