"""The overhead of a whole mesh: every figure that is promised is there and means what it says."""

import json
from pathlib import Path

import pytest

from bench.command import BenchError, main
from bench.dynamo import running_dynamo


@pytest.mark.mesh
def test_a_small_run_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["overhead", "--json", "--clients", "4", "--seconds", "1", "--words", "40", "--text", "bytes"]
    assert main(words) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["c4_req_s"] > 0
    assert 0 < row["c1_p50_ms"] <= row["c1_p99_ms"]
    for role in ("router", "envoy", "decode", "prefill", "kvstore", "load"):
        assert row[f"{role}_cpu_ms"] > 0
    phases = [value for key, value in row.items() if key.startswith("phase_")]
    assert len(phases) == 8
    # The phases are parts of what the client waits for.
    assert sum(phases) < row["c1_p99_ms"] * 2


@pytest.mark.parametrize("words", [["--clients", "0"], ["--seconds", "0"], ["--rounds", "0"]])
def test_what_cannot_be_measured_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", *words]) == 1
    assert "above 0" in capsys.readouterr().err


def test_a_missing_peer_is_named_with_the_way_to_install_it(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match="pip install --no-deps ai-dynamo"),
        running_dynamo(tmp_path, tmp_path, "m"),
    ):
        pass
