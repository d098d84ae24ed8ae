"""When decode waits between two steps."""

from __future__ import annotations

import pytest

from decode.pacing import NEVER, Pacing


def test_without_waiting_prompts_the_next_step_begins_at_once() -> None:
    assert Pacing(0.04).pause_s(0.001, prompts_waiting=0) == 0


def test_with_waiting_prompts_steps_begin_an_interval_apart() -> None:
    assert Pacing(0.04).pause_s(0.01, prompts_waiting=2) == pytest.approx(0.03)
    assert Pacing(0.04).pause_s(0.05, prompts_waiting=2) == 0


def test_a_worker_with_processors_of_its_own_never_waits() -> None:
    assert NEVER.pause_s(0.0, prompts_waiting=9) == 0
