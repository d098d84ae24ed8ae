"""Turns and chunk lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefill.run import Run
from prefill.schedule import ACTIVE_RUNS, MOST_TOKENS, PATIENT_TURN, TARGET_S, Pace, Queue
from tests.prefill.orders import P, order


def run(name: str, arrival: int, blocks: int = 1) -> Run:
    return Run(order(blocks, name, arrival_unix_ns=arrival), 0.0)


def test_a_short_prompt_goes_before_a_long_one_which_still_advances() -> None:
    queue = Queue()
    long, short = run("long/0", 1, blocks=9), run("short/0", 2)
    queue.add(long)
    assert [queue.next(), queue.next()] == [long, long]
    queue.add(short)
    turns = [queue.next() for _ in range(4 * PATIENT_TURN)]
    assert turns[0] is short
    assert turns.count(short) > turns.count(long) >= 2


def test_equal_prompts_are_finished_one_after_another() -> None:
    """Taking turns would make all of them as late as the last."""
    queue = Queue()
    first, second = run("a/0", 1, blocks=4), run("b/0", 2, blocks=4)
    queue.add(second)
    queue.add(first)
    finished = []
    while len(queue):
        now = queue.next()
        assert now is not None
        now.committed[now.committed.index(False)] = True
        if not now.missing_blocks:
            queue.remove(now)
            finished.append((now, sum(second.committed) if now is first else 4))
    assert [now for now, _ in finished] == [first, second]
    assert finished[0][1] <= 1


def test_only_a_few_of_the_oldest_take_turns() -> None:
    queue = Queue()
    runs = [run(f"r{i}/0", i) for i in range(ACTIVE_RUNS + 3)]
    for item in reversed(runs):
        queue.add(item)
    turns = 2 * ACTIVE_RUNS * PATIENT_TURN
    assert {queue.next() for _ in range(turns)} == set(runs[:ACTIVE_RUNS])
    queue.remove(runs[0])
    assert {queue.next() for _ in range(turns)} == set(runs[1 : ACTIVE_RUNS + 1])


def test_a_run_has_one_turn_at_a_time() -> None:
    queue = Queue()
    first, second = run("a/0", 1), run("b/0", 2)
    queue.add(first)
    assert queue.next({first}) is None
    queue.add(second)
    assert queue.next({first}) is second


def test_an_empty_queue_has_no_turn() -> None:
    queue = Queue()
    assert queue.next() is None
    queue.remove(run("r/0", 1))
    assert len(queue) == 0


@given(token_us=st.integers(10, 20_000))
def test_chunks_come_to_take_about_the_target(token_us: int) -> None:
    pace = Pace(P)
    token_s = token_us / 1e6
    for _ in range(12):
        tokens = pace.blocks * P
        pace.measured(tokens, tokens * token_s)
    took = pace.blocks * P * token_s
    assert took <= TARGET_S or pace.blocks == 1
    assert took > TARGET_S - P * token_s - 1e-9 or pace.blocks * P == MOST_TOKENS


def test_chunks_grow_at_most_twofold_a_time() -> None:
    pace = Pace(P)
    before = pace.blocks
    pace.measured(before * P, 1e-6)
    assert pace.blocks == 2 * before
