"""The threads of the cpu executor: where they stay, and that they sleep when there is nothing to do."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import engine
from engine import EngineError, Slice
from tests.engine.pools import bind, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and holds threads to processors")
T = TypeVar("T")


def threads_of_this_process() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def in_a_thread(job: Callable[[], T]) -> T:
    """So that this process's own threads stay free."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(job()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_stay_on_their_processors() -> None:
    processor = max(os.sched_getaffinity(0))
    before = threads_of_this_process()
    model = engine.load("tiny:seed=1", executor="cpu", threads=3, cpus=(processor,))
    started = threads_of_this_process() - before
    assert len(started) == 2
    bind(model, 32)

    def step() -> set[int]:
        model.step([Slice([65, 66, 67, 68, 69] * 59, 0, range(32), 1)])
        return os.sched_getaffinity(0)

    assert in_a_thread(step) == {processor}
    assert all(os.sched_getaffinity(thread) == {processor} for thread in started)
    assert os.sched_getaffinity(0) != {processor} or os.cpu_count() == 1


def test_where_threads_stay_changes_no_bit() -> None:
    def answer(*, threads: int, cpus: tuple[int, ...]) -> bytes:
        model = engine.load("tiny:seed=1", executor="cpu", threads=threads, cpus=cpus)
        bind(model, 32)
        return rows(model.step([Slice([65, 66, 67, 68, 69] * 59, 0, range(32), 9)])[0]).tobytes()

    some = tuple(sorted(os.sched_getaffinity(0)))[:1]
    free = in_a_thread(lambda: answer(threads=1, cpus=()))
    assert in_a_thread(lambda: answer(threads=1, cpus=some)) == free
    assert in_a_thread(lambda: answer(threads=4, cpus=some)) == free


def test_a_processor_that_cannot_be_is_refused() -> None:
    with pytest.raises(EngineError, match="CPU"):
        engine.load("tiny:seed=1", executor="cpu", threads=2, cpus=(1 << 20,))


def test_idle_threads_cost_nothing() -> None:
    model = engine.load("tiny:seed=1", executor="cpu", threads=4)
    bind(model, 32)
    for _ in range(20):
        model.step([Slice([65, 66, 67, 68, 69] * 59, 0, range(32), 1)])
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1
