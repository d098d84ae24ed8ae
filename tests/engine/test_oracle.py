"""SmolLM2 against the float32 reference: log-probabilities and greedy continuations."""

import json
from typing import Any

import numpy as np
import pytest

from engine import Executor, Slice
from engine.generate import generate
from engine.sampling import SamplingParams
from tests.engine.pools import bind, oracle, rows

pytestmark = pytest.mark.model

TOLERANCE = 1e-3
CLEAR_MARGIN = 0.01
QUICK_TEXTS = ["tiny-prose", "tiny-code", "short-prose", "short-code"]
QUICK_GREEDY = ["chat-0", "chat-6"]
SLOW_TEXTS = ["mid-manual", "mid-multilingual", "mid-json", "long-market", "long-python", "xlong-lighthouse"]
SLOW_GREEDY = ["chat-1", "chat-2", "chat-3", "chat-4", "chat-5", "long-plain"]


def some(quick: list[str], slow: list[str]) -> list[Any]:
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    lines = oracle("logits_smollm2-135m.jsonl").read_text().splitlines()
    return {record["name"]: record for record in map(json.loads, lines)}


def teacher_forced(model: Executor, ids: list[int], first: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits of all positions from `first` on."""
    pages = range(model.info.layout.pages_for(len(ids)))
    bind(model, len(pages))
    found = []
    for start in range(0, len(ids), 100):
        part = ids[start : start + 100]
        wanted = min(len(part), max(0, start + len(part) - first))
        result = model.step([Slice(part, start, pages, wanted)])[0]
        if wanted:
            found.append(rows(result))
    return np.concatenate(found)


@pytest.mark.parametrize("name", some(QUICK_TEXTS, SLOW_TEXTS))
def test_log_probabilities(real_model: Executor, records: dict[str, dict[str, Any]], name: str) -> None:
    record = records[name]
    positions = record["positions"]
    logits = teacher_forced(real_model, record["ids"], 0)[positions].astype(np.float64)
    peaks = logits.max(1)
    logprobs = logits - peaks[:, None]
    logprobs -= np.log(np.exp(logprobs).sum(1))[:, None]
    top = np.take_along_axis(logprobs, np.array(record["top_ids"]), axis=1)
    np.testing.assert_allclose(top, record["top_lps"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(peaks, record["max_logit"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", some(QUICK_GREEDY, SLOW_GREEDY))
def test_greedy_tokens(real_model: Executor, records: dict[str, dict[str, Any]], name: str) -> None:
    record = records[name]
    prompt, ids, margins = record["prompt_ids"], record["ids"], record["margin"]
    chosen = teacher_forced(real_model, [*prompt, *ids[:-1]], len(prompt) - 1).argmax(1).tolist()
    assert len(chosen) == len(ids)
    clear = [step for step, margin in enumerate(margins) if margin > CLEAR_MARGIN]
    assert len(clear) > len(ids) // 2
    assert [chosen[step] for step in clear] == [ids[step] for step in clear]


def test_free_running_greedy(real_model: Executor, records: dict[str, dict[str, Any]]) -> None:
    record = records["chat-6"]
    assert min(record["margin"][:16]) > CLEAR_MARGIN
    assert generate(real_model, record["prompt_ids"], SamplingParams(temperature=0), 16) == record["ids"][:16]
