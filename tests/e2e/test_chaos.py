"""`kvmesh chaos` on a mesh of pairs: nothing fails, nothing differs, nothing leaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Mesh, running

PAIRS = ["--router", "2", "--prefill", "2", "--decode", "2", "--kv-memory", "128M"]


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    state = tmp_path_factory.mktemp("fragile") / "state"
    with running(state, ["--fault-points", "--model", "tiny=tiny:seed=1", *PAIRS]) as mesh:
        yield mesh


def chaos(mesh: Mesh, *args: str, timeout_s: float) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(mesh.cli("chaos", "--json", *args, timeout_s=timeout_s, check=False))
    return report


def check(report: dict[str, Any]) -> None:
    control, *cells = report["cells"]
    assert control["cell"] == "undisturbed"
    assert control["deaths"] == 0
    for cell in cells:
        assert cell["deaths"] > 0, cell
        assert cell["failed"] == 0, cell
        assert cell["different"] == 0, cell
        assert cell["leaked_pages"] == 0, cell
        # At most a page, and what was made while one commit was in flight.
        assert cell["recomputed_mean"] <= 16, cell
        assert cell["broken_streams"] == 0 or "router" in cell["cell"], cell
    assert report["well"]


def test_deaths_and_hangs_are_not_seen_by_clients(fragile: Mesh) -> None:  # B65, B66
    cells = [
        "kill:decode:streaming",
        "hang:decode:first_token",
        "kill:prefill:prefilling",
        "kill:kvstore:queued",
        "hang:iam:queued",
    ]
    args = [word for cell in cells for word in ("--cell", cell)]
    check(chaos(fragile, "--requests", "16", *args, timeout_s=300))


def test_a_mesh_without_fault_points_is_left_alone(mesh: Mesh) -> None:
    before = mesh.pids()
    assert mesh.cli("chaos", "--json", check=False) == ""
    assert mesh.pids() == before


@pytest.mark.slow
def test_the_whole_matrix(fragile: Mesh) -> None:
    report = chaos(fragile, "--requests", "24", timeout_s=1800)
    assert len(report["cells"]) == 61
    check(report)
