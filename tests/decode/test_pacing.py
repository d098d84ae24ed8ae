"""When decode waits between two steps."""

from __future__ import annotations

import pytest

from decode.pacing import MOST, NEVER, Pacing

PACING = Pacing(0.04)


def test_without_waiting_prompts_the_next_step_begins_at_once() -> None:
    assert PACING.pause_s(0.001, waiting=0, generating=5) == 0


def test_with_waiting_prompts_steps_begin_an_interval_apart() -> None:
    assert PACING.pause_s(0.01, waiting=1, generating=1000) == pytest.approx(0.03, rel=0.01)
    assert PACING.pause_s(0.05, waiting=1, generating=1000) == 0


def test_the_more_wait_the_longer_up_to_a_limit() -> None:
    pauses = [PACING.pause_s(0.0, waiting=n, generating=8) for n in (1, 4, 8, 16, 64)]
    assert pauses == sorted(pauses)
    assert pauses[2] == pytest.approx(0.08)
    assert pauses[-1] == pytest.approx(0.04 * MOST)
    assert PACING.pause_s(0.0, waiting=5, generating=0) == pytest.approx(0.04 * MOST)


def test_a_worker_with_processors_of_its_own_never_waits() -> None:
    assert NEVER.pause_s(0.0, waiting=9, generating=1) == 0
