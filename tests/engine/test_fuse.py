"""Each pass leaves a program that computes the same."""

from collections.abc import Callable

import numpy as np
import pytest

from engine import reference
from engine.executor import Logits
from engine.fuse import fuse, one_product, one_rope, without_unused
from engine.models import build
from engine.program import Linear, Program, Rope
from engine.reference import ReferenceExecutor
from engine.tiny import TinySpec, tiny_model
from tests.engine.pools import bind, run

TOKENS = list(range(50, 120))


def logits_with(passes: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch) -> Logits:
    monkeypatch.setattr(reference, "fuse", passes)
    executor = ReferenceExecutor(tiny_model(TinySpec(seed=4)), threads=1, page_tokens=16, kv_dtype="f32")
    bind(executor, 8)
    return run(executor, TOKENS, range(8), [len(TOKENS)])


@pytest.mark.parametrize("passes", [one_product, fuse, lambda program: without_unused(fuse(program))])
def test_the_result_is_the_same(
    passes: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits_with(lambda program: program, monkeypatch)
    np.testing.assert_allclose(logits_with(passes, monkeypatch), plain, rtol=0, atol=1e-4)


def test_products_of_one_input_become_one() -> None:
    program, _ = build(tiny_model(TinySpec(layers=1)))
    before = [op for op in program.operations if isinstance(op, Linear)]
    after = [op for op in fuse(program).operations if isinstance(op, Linear)]
    assert len(before) == 8
    assert [len(op.weight.names) for op in after] == [3, 1, 2, 1, 1]
    assert after[0].out.width == 32 + 16 + 16


def test_ropes_that_lie_side_by_side_become_one() -> None:
    program, _ = build(tiny_model(TinySpec(layers=1)))
    ropes = [op for op in one_rope(one_product(program)).operations if isinstance(op, Rope)]
    assert [op.heads for op in ropes] == [6]


def test_without_logits_the_last_layer_ends_with_its_pages() -> None:
    program, _ = build(tiny_model(TinySpec(layers=1)), logits=False)
    kept = without_unused(fuse(program))
    assert [type(op).__name__ for op in kept.operations][-1] == "WriteKv"
    assert [type(op).__name__ for op in fuse(program).operations][-1] == "Add"
