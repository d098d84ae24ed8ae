"""Imports point one way: the table of docs/architecture.md, held against the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "text": set[str](),
    "kernels": set[str](),
    "deploy": set[str](),
    "engine": {"kernels", "text"},
    "mesh": {"kvmesh", "deploy"},
    "prefill": {"kvmesh", "mesh", "engine", "text"},
    "decode": {"kvmesh", "mesh", "engine", "text"},
    "router": {"kvmesh", "mesh", "text"},
    "kvstore": {"kvmesh", "mesh"},
    "iam_authz": {"kvmesh", "mesh"},
    "response_store": {"kvmesh", "mesh"},
    "encode": {"kvmesh", "mesh"},
    "bench": {"kvmesh", "mesh", "engine", "kernels", "text", "kvstore"},
}
OURS = {*MAY_IMPORT, "kvmesh"}
WITHOUT_TORCH = ("text", "deploy", "mesh", "router", "kvstore", "iam_authz", "response_store", "encode")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(extra)
        for path in (ROOT / package).rglob("*.py")
        if (extra := (imported(path) & OURS) - MAY_IMPORT[package] - {package})
    }
    assert not wrong


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_services_that_hold_no_weights_never_name_torch(package: str) -> None:
    wrong = [str(p) for p in (ROOT / package).rglob("*.py") if "torch" in imported(p)]
    assert not wrong


@pytest.mark.parametrize("service", ["router", "kvstore", "iam_authz", "response_store", "encode"])
def test_starting_a_service_loads_no_torch(service: str) -> None:
    code = f"import sys, {service}.server; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_env(), check=False)
    assert done.returncode == 0


def test_a_worker_computes_without_torch() -> None:
    """As on a machine that has none: importing it fails."""
    code = """
import sys
sys.modules["torch"] = None
import engine, prefill.server, decode.server
from engine.generate import generate
from engine.sampling import SamplingParams
assert len(generate(engine.load("tiny:seed=1"), [65, 66], SamplingParams(temperature=0), 3)) == 3
try:
    engine.load("tiny:seed=1", executor="reference")
except engine.EngineError as error:
    assert "needs torch" in str(error)
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_env(), check=False)
    assert done.returncode == 0


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
