"""Idle costs next to nothing: no polling loop anywhere."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import running

IDLE_S = float(os.environ.get("KVMESH_IDLE_S", "600"))


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
@pytest.mark.model
def test_ten_idle_minutes(tmp_path: Path) -> None:
    with running(tmp_path / "state", []) as mesh:
        status = mesh.status()
        roles = {p["pid"]: p["role"] for p in status["processes"]} | {
            status["supervisor"]["pid"]: "supervisor"
        }
        time.sleep(20)
        before = {pid: cpu_s(pid) for pid in roles}
        time.sleep(IDLE_S)
        percent = {pid: 100 * (cpu_s(pid) - before[pid]) / IDLE_S for pid in roles}
        ours = sum(p for pid, p in percent.items() if roles[pid] not in ("envoy", "nats"))
        print(
            {roles[pid]: round(p, 3) for pid, p in percent.items()},
            "python",
            ours,
            "all",
            sum(percent.values()),
        )
        assert ours < 0.7
        assert sum(percent.values()) < 1.5
