"""`kvmesh test` and `kvmesh lint`: what a change must pass."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mesh.cli.style import paint

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "text",
    "kernels",
    "engine",
    "mesh",
    "router",
    "prefill",
    "decode",
    "kvstore",
    "iam_authz",
    "response_store",
    "encode",
    "deploy",
)
_CHECKED = (*_PACKAGES, "tests", "bench")
_NO_TESTS = 5


def run(arguments: argparse.Namespace) -> int:
    os.chdir(ROOT)
    return _lint(fix=arguments.fix) if arguments.action == "lint" else _test(arguments)


def _test(arguments: argparse.Namespace) -> int:
    """Style and types, the fast tests, then those on a whole mesh; stops at the first that fails."""
    if arguments.pytest:
        return _call("pytest", [sys.executable, "-m", "pytest", *arguments.pytest])
    for name, command in _style(fix=False):
        if status := _call(name, command):
            return status
    slow = "" if arguments.full else "not slow and "
    # One file stays in one process: its fixtures (built cores, servers) are made once.
    spread = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile"]
    quick = [sys.executable, "-m", "pytest", *spread, "-m", f"{slow}not mesh"]
    if status := _call("tests", quick):
        return status
    whole = [sys.executable, "-m", "pytest", "-m", f"{slow}mesh"]
    status = _call("tests on a whole mesh", whole)
    return 0 if status == _NO_TESTS else status


def _lint(*, fix: bool) -> int:
    """All checks, also after one has failed."""
    buf = str(Path(sys.executable).with_name("buf"))
    checks = [*_style(fix=fix), ("buf lint", [buf, "lint", "protos"])]
    failed = [name for name, command in checks if _call(name, command) != 0]
    if not _breaking(buf):
        failed.append("buf breaking")
    if not _generated_is_current():
        failed.append("generated code")
    print(paint(f"failed: {', '.join(failed)}", "red") if failed else paint("all well", "green"))
    return 1 if failed else 0


def _style(*, fix: bool) -> list[tuple[str, list[str]]]:
    checked = [name for name in _CHECKED if (ROOT / name).exists() and any((ROOT / name).rglob("*.py"))]
    ruff, mypy = [sys.executable, "-m", "ruff"], [sys.executable, "-m", "mypy"]
    return [
        ("ruff format", [*ruff, "format", *([] if fix else ["--check"]), "--quiet", "."]),
        ("ruff check", [*ruff, "check", *(["--fix"] if fix else []), "--quiet", "."]),
        ("mypy", [*mypy, "--no-error-summary", *checked]),
    ]


def _breaking(buf: str) -> bool:
    """Against the last commit's contract, if there is one."""
    inside = subprocess.run(
        ["git", "cat-file", "-e", "HEAD:protos/buf.yaml"], capture_output=True, check=False
    )
    if inside.returncode != 0:
        print(f"{paint('·', 'dim')} buf breaking: no committed contract to compare with")
        return True
    with tempfile.TemporaryDirectory() as scratch:
        # An archive of the folder, so that a shallow or linked clone will do as well.
        archive = subprocess.run(["git", "archive", "HEAD", "protos"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", scratch], input=archive.stdout, check=True)
        return _call("buf breaking", [buf, "breaking", "protos", "--against", f"{scratch}/protos"]) == 0


def _generated_is_current() -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        if _call("generate", [sys.executable, "protos/generate.py", scratch]) != 0:
            return False
        made = sorted(p.relative_to(scratch) for p in Path(scratch).rglob("*_pb2*"))
        old = [str(p) for p in made if not _same(ROOT / "protos" / p, Path(scratch) / p)]
    if old:
        print(f"{paint('✗', 'red')} not what protos/generate.py makes: {', '.join(old)}")
    return not old


def _same(ours: Path, made: Path) -> bool:
    return ours.exists() and filecmp.cmp(ours, made, shallow=False)


def _call(name: str, command: Sequence[str]) -> int:
    print(paint(f"— {name}", "dim"), flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        print(f"{paint('✗', 'red')} {name} (status {status})", flush=True)
    return status
