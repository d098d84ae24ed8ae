"""What goes wrong with one sequence of a step touches no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from decode.request import Request
from decode.scheduler import Part
from decode.stepper import Failed, Stepper
from engine import EngineInfo, Executor, Slice, SliceMeta, load
from engine.executor import Arena, StepResult
from engine.sampling import Sampled
from mesh.kv.page import Page
from tests.decode.openings import P, opening
from tests.decode.test_scheduler import Outbox


class Moody:
    """Gives token 3; NaN for prompts that begin with 1, raises for batches with one that begins with 2."""

    def __init__(self) -> None:
        self.inner: Executor = load("script:")
        self.batches: list[int] = []

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    def bind(self, arena: Arena, pages: int, page_bytes: int) -> None:
        raise NotImplementedError

    def step(self, batch: Sequence[Slice]) -> list[StepResult]:
        self.batches.append(len(batch))
        if any(s.tokens[0] == 2 for s in batch):
            raise RuntimeError("a bug")
        return [self._logits(s) for s in batch]

    def draft(self, meta: SliceMeta) -> list[int]:
        raise ValueError("another bug")

    def _logits(self, slice_: Slice) -> StepResult:
        logits = np.zeros((slice_.logits, 272), np.float32)
        logits[:, 3] = np.nan if slice_.tokens[0] == 1 else 9.0
        return logits


def part(first: int, n: int = 1) -> Part:
    asked = opening([first, 5, 6], f"r{first}/0", n=n)
    request = Request(asked, Outbox(), 0)
    request.reserved([], [Page(0, 1)])
    request.begin(P, {})
    stem = request.choices[0]
    request.grow(stem, 1, lambda count: None)
    return Part(request, stem, 3, True, (), tuple(Page(1 + i, 1) for i in range(n - 1)))


@pytest.fixture
def executor() -> Moody:
    return Moody()


@pytest.fixture
def stepper(executor: Moody) -> Stepper:
    return Stepper(executor, memoryview(bytearray(b"abcdefgh")), 2)


def test_a_row_that_is_no_number_fails_alone(stepper: Stepper) -> None:
    good, bad, last = stepper.run([part(4), part(1), part(5)])
    assert good == last == [Sampled(3)]
    assert isinstance(bad, Failed)
    assert bad.code == "no_sample"


def test_a_step_that_raises_is_halved_until_the_one_at_fault_is_alone(
    stepper: Stepper, executor: Moody
) -> None:
    outcomes = stepper.run([part(4), part(5), part(6), part(2), part(7)])
    assert [isinstance(o, Failed) for o in outcomes] == [False, False, False, True, False]
    assert executor.batches[0] == 5


def test_a_draft_that_raises_is_no_draft(stepper: Stepper) -> None:
    item = part(4)
    assert stepper.draft(item.request, item.choice) == []


def test_the_unfinished_page_is_copied_for_each_further_choice(executor: Moody) -> None:
    arena = bytearray(b"abcdefgh")
    [outcome] = Stepper(executor, memoryview(arena), 2).run([part(4, n=3)])
    assert outcome == [Sampled(3)] * 3
    assert arena == b"abababgh"
