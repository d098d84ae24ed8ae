"""Distances from an oracle: a file made from a model's own answers, and what is wrong with a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from bench.command import main
from engine import Slice
from tests.engine.pools import bind, rows

MODEL = "tiny:seed=3"


def answers(ids: list[int]) -> Any:
    model = engine.load(MODEL, executor="cpu", kv_dtype="f32")
    bind(model, 8)
    logits = rows(model.step([Slice(ids, 0, range(8), len(ids))])[0]).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def records(shift: float = 0.0) -> list[dict[str, Any]]:
    """What the model itself says; from position 1 on its top token is made likelier by `shift` nats."""
    ids = list(range(40, 60))
    lps = answers(ids)
    order = np.argsort(-lps, axis=1)[:, :5]
    top = np.take_along_axis(lps, order, axis=1)
    top[1:, 0] += shift
    teacher = {
        "kind": "teacher", "name": "own", "ids": ids, "positions": list(range(len(ids))),
        "top_ids": order.tolist(), "top_lps": top.tolist(),
        "next_lp": [*(float(lps[i, ids[i + 1]]) for i in range(len(ids) - 1)), None],
    }  # fmt: skip
    greedy = {
        "kind": "greedy", "name": "on", "prompt_ids": ids, "ids": [int(order[-1, 0])], "margin": [0.5],
    }  # fmt: skip
    return [teacher, greedy, {"kind": "other", "name": "passed over"}]


def measured(tmp_path: Path, lines: list[Any], capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    file = tmp_path / "logits_own.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert main(["accuracy", str(file), "--json", "--model", MODEL, "--kv-dtype", "f32", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = measured(tmp_path, records(), capsys)
    assert row["positions"] == 19
    assert row["apart_positions"] == 1
    assert row["kl_mean"] < 1e-6
    assert row["top1_agreement_pct"] == row["greedy_agreement_pct"] == 100
    assert row["largest_difference_nats"] < 1e-4


def test_a_difference_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = measured(tmp_path, records(shift=0.05), capsys)
    assert row["kl_mean"] > 1e-5
    assert row["kl_p99"] >= row["kl_mean"]
    assert row["largest_difference_nats"] == pytest.approx(0.05, abs=1e-3)
    assert row["apart_largest_difference_nats"] < 1e-4


def test_a_wrong_continuation_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, greedy, _ = records()
    greedy["ids"] = [(greedy["ids"][0] + 1) % 256]
    row = measured(tmp_path, [teacher, greedy], capsys)
    assert row["greedy_agreement_pct"] == 0
    assert row["greedy_flip_margin_max_nats"] == 0.5


def test_exact_kl_is_taken_over_the_whole_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measured(tmp_path, records(), capsys, "--exact")
    assert row["kl_kind"] == "whole vocabulary"
    # Quantised activations against float32: near, and not the same.
    assert 0 <= row["kl_mean"] < 0.5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1"),
        ('{"kind": "teacher", "name": "x"}', "ids, positions, top_ids, top_lps"),
        ('{"name": "x"}', "kind"),
        ("", "no record"),
    ],
)
def test_a_file_that_is_none(
    tmp_path: Path, line: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "logits_own.jsonl"
    file.write_text(line)
    assert main(["accuracy", str(file), "--model", MODEL]) == 1
    assert reason in capsys.readouterr().err
