"""`kvmesh bench`: what a user types, and what a program reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.command import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def kvmesh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "kvmesh"), "bench", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "KVMESH_VENV": sys.prefix},
        check=False,
    )


def test_the_front_door_lists_and_refuses() -> None:
    done = kvmesh("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    wrong = kvmesh("speed")
    assert wrong.returncode == 2
    assert "engine" in wrong.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_a_reason_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--model", "/nowhere/model.gguf"]) == 1
    assert "/nowhere/model.gguf" in capsys.readouterr().err


def test_engine_through_the_front_door() -> None:
    """Every figure has its key, positive, and its share of what the machine gives."""
    done = kvmesh("engine", "--json", "--model", "tiny:seed=1", "--repeats", "1", "--depths", "0", "1024")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    speeds = ["pp512_tok_s", "tg64_tok_s", "tg64_b4_tok_s", "tg64_b16_tok_s", "tg64_b64_tok_s"]
    depths = ["tg32_d0_tok_s", "tg32_d1024_tok_s"]
    shares = ["tg64_gb_s", "tg64_read_peak_pct", "pp512_gop_s", "peak_read_gb_s"]
    assert all(row[key] > 0 for key in [*speeds, *depths, *shares])
    # Nothing beats what was measured as the most; a busy machine may blur both.
    assert all(row[key] < 200 for key in row if key.endswith("_pct"))
