"""Streams and their lateness: what counts as late, and one small run through a whole mesh."""

import json

import pytest

from bench.command import main
from bench.stream_load import lateness_ms


def test_lateness_is_after_the_streams_own_schedule() -> None:
    # 10 tokens a second: the third comes 0.05 s late, the fourth in time again.
    late = lateness_ms([1.0, 1.1, 1.25, 1.3], [1, 2, 3, 4], 10.0, since=0.0)
    assert late == pytest.approx([0, 0, 50, 0])


def test_joined_tokens_are_each_as_late_as_they_are() -> None:
    late = lateness_ms([1.0, 1.3], [1, 4], 10.0, since=0.0)
    assert late == pytest.approx([0, 200, 100, 0])


def test_what_came_while_streams_began_does_not_count() -> None:
    assert lateness_ms([1.0, 5.0], [1, 2], 10.0, since=2.0) == pytest.approx([0])


@pytest.mark.mesh
def test_a_small_run_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["streams", "--json", "--streams", "3", "--rate", "20", "--seconds", "2"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["streams"], row["failed"]) == (3, 0)
    assert 0 <= row["late_p50_ms"] <= row["late_p99_ms"] <= row["late_max_ms"]
    assert row["tok_s"] > 0
    assert row["router_cores"] > 0


@pytest.mark.parametrize("words", [["--streams", "0"], ["--rate", "0"], ["--seconds", "0"]])
def test_what_cannot_be_measured_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["streams", *words]) == 1
    assert "above 0" in capsys.readouterr().err
