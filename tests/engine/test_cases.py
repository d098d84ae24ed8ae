"""What other servers got wrong, with the cpu executor: seeds in company, tiny temperatures, numbers past f16."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import Executor, Slice
from engine.generate import Generation, generate, generate_batch
from engine.sampling import Sampled, SampleFailure, SampleRow, SamplingParams, sample
from tests.engine.pools import bind, rows
from tests.engine.test_safetensors import tensors, write

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def tiny() -> Executor:
    return engine.load("tiny:seed=2")


def beside(executor: Executor, params: SamplingParams, others: Sequence[SamplingParams]) -> list[int]:
    """What one request gives beside others of other lengths."""
    company = [Generation([65 + i] * (3 + 7 * i), one, 30) for i, one in enumerate(others)]
    mine = Generation(PROMPT, params, 24)
    generate_batch(executor, [*company[:2], mine, *company[2:]], chunk_tokens=9)
    return mine.tokens


def test_a_seeded_request_does_not_depend_on_its_company(tiny: Executor) -> None:
    params = SamplingParams(temperature=0.9, seed=1234)
    alone = generate(tiny, PROMPT, params, 24)
    seeded = [SamplingParams(temperature=1.2, seed=i) for i in range(3)]
    others = [SamplingParams(temperature=0.9, seed=99), SamplingParams(temperature=0), SamplingParams(seed=5)]
    assert beside(tiny, params, seeded) == alone
    assert beside(tiny, params, others) == alone
    assert generate(engine.load("tiny:seed=2", threads=2), PROMPT, params, 24) == alone
    choices = [Generation(PROMPT, params, 24, choice=i) for i in range(2)]
    first, second = generate_batch(tiny, choices)
    assert first == alone
    assert second != alone


@pytest.mark.parametrize("temperature", [1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("changes", [{}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_a_tiny_temperature_is_greedy(tiny: Executor, temperature: float, changes: dict[str, float]) -> None:
    greedy = generate(tiny, PROMPT, SamplingParams(temperature=0), 16)
    params = SamplingParams(temperature=temperature, seed=3, **changes)  # type: ignore[arg-type]
    assert generate(tiny, PROMPT, params, 16) == greedy
    assert beside(tiny, SamplingParams(temperature=0), [params] * 3)[:16] == greedy


def test_a_number_past_f16_fails_its_row_alone_and_is_none_with_wide_pages(tmp_path: Path) -> None:
    """One token's value passes 65,504: the row that reads it fails, never token 0 with status 200."""
    arrays = tensors()
    arrays["model.layers.0.self_attn.v_proj.bias"][:] = 0
    arrays["model.layers.0.self_attn.v_proj.weight"] *= 3e5
    directory = str(write(tmp_path / "m", arrays))
    params = SampleRow(SamplingParams(temperature=0), 0, 0)
    narrow, wide = engine.load(directory), engine.load(directory, kv_dtype="f32")
    found = {}
    for name, model in (("narrow", narrow), ("wide", wide)):
        bind(model, 4)
        found[name] = rows(model.step([Slice([1, 5, 9], 0, [0], 1)])[0])
    assert not np.isfinite(found["narrow"]).all()
    broken, fine = sample(np.concatenate([found["narrow"], found["wide"]]), [params, params])
    assert isinstance(broken, SampleFailure)
    assert fine == Sampled(int(found["wide"][0].argmax()))
