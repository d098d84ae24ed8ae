"""Fault points do what their rules say, at the passing that they name, and nothing without rules."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mesh.faults import NO_FAULTS, Action, BadRule, FaultPoints, Rule


def points(tmp_path: Path, *rules: dict[str, Any]) -> FaultPoints:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(rules))
    faults = FaultPoints()
    faults.load(file, tmp_path / "fired")
    return faults


def fired(tmp_path: Path) -> list[list[str]]:
    file = tmp_path / "fired"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def test_a_rule_acts_at_its_passing_and_not_more_often(tmp_path: Path) -> None:
    rule = {"point": "commit", "action": "drop", "nth": 2, "every": 3, "times": 2}
    faults = points(tmp_path, rule, {"point": "step", "action": "delay", "seconds": 0.5})
    acts = [faults.at("commit") for _ in range(12)]
    assert [place for place, act in enumerate(acts, 1) if act] == [2, 5]
    assert all(act.action is Action.DROP for act in acts if act)
    delay = faults.at("step")
    assert delay is not None
    assert delay.seconds == 0.5
    assert faults.at("queued") is None
    assert [line[1:3] for line in fired(tmp_path)] == [["commit", "drop"]] * 2 + [["step", "delay"]]


def test_without_rules_nothing_happens(tmp_path: Path) -> None:
    assert NO_FAULTS.at("streaming") is None
    faults = points(tmp_path, {"point": "step", "action": "delay"})
    (tmp_path / "rules.json").unlink()
    faults.load(tmp_path / "rules.json", tmp_path / "fired")
    assert faults.at("step") is None


@pytest.mark.parametrize(
    "rule",
    [
        {"point": "nowhere", "action": "kill"},
        {"point": "streaming", "action": "corrupt"},
        {"point": "step", "action": "explode"},
        {"action": "kill"},
        {"point": "step", "action": "delay", "often": 3},
        {"point": "step", "action": "delay", "nth": 0},
    ],
)
def test_a_rule_that_means_nothing_is_refused(tmp_path: Path, rule: dict[str, Any]) -> None:
    with pytest.raises(BadRule):
        Rule.of(rule)
    # Of a list with one such rule none is followed.
    assert points(tmp_path, {"point": "step", "action": "delay"}, rule).at("step") is None


@pytest.mark.parametrize("action", ["kill", "hang"])
def test_a_signal_goes_to_whom_the_rule_names(tmp_path: Path, action: str) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        faults = points(tmp_path, {"point": "queued", "action": action, "pid": victim.pid})
        assert faults.at("queued") is None
        if action == "kill":
            assert victim.wait(10) == -signal.SIGKILL
        else:
            end = time.monotonic() + 10
            while Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        victim.kill()
        victim.wait()
    # Nobody there any more: no error.
    assert faults.at("queued") is None
