"""What workers are told: their part of the processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.processors import allowed
from mesh.supervisor.options import MeshOptions
from mesh.supervisor.plan import ModelPlan, Plan
from mesh.supervisor.state import create_state


def told(tmp_path: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """The options of every worker, by name."""
    state = create_state(tmp_path / "s")
    plan = Plan(MeshOptions(state=state.root, **options), state, kv_bytes=1 << 20)
    found = {}
    for spec in plan.workers(ModelPlan("tiny", "tiny:", "tiny:")):
        spec.prepare(False)
        config = json.loads((state.run / f"{spec.name}.config.json").read_text())
        found[spec.name] = config["options"]
    return found


def test_the_cpu_executor_uses_all_processors_and_decode_leaves_some_to_prompts(tmp_path: Path) -> None:
    options = told(tmp_path, executor="cpu")
    most = min(len(allowed()), 8)
    assert options["prefill-tiny-0"]["threads"] == options["decode-tiny-0"]["threads"] == most
    assert options["decode-tiny-0"]["pace_s"] > 0
    assert "pace_s" not in options["prefill-tiny-0"]


def test_threads_are_what_was_asked_for(tmp_path: Path) -> None:
    options = told(tmp_path, executor="cpu", threads=3, role_options={"decode": {"threads": 1}})
    assert options["prefill-tiny-0"]["threads"] == 3
    assert options["decode-tiny-0"]["threads"] == 1


def test_workers_with_room_for_all_are_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.supervisor.plan.allowed", lambda: tuple(range(16)))
    assert "pace_s" not in told(tmp_path, executor="cpu", threads=2)["decode-tiny-0"]


def test_pinned_workers_have_processors_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.supervisor.plan.allowed", lambda: tuple(range(16)))
    options = told(tmp_path, executor="cpu", threads=2, pin=True, decode=2)
    assert [each["cpus"] for each in options.values()] == ["0,1", "2,3", "4,5"]
