"""Environments of public clients: their own, made of pinned files once, and kept for the next run.

Where a registry cannot be reached the test that wants one is skipped, with what pip or npm said.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
CACHE = Path(os.environ.get("KVMESH_CLIENTS", Path.home() / ".cache" / "kvmesh" / "clients"))
INSTALL_S = 600


def python_of(name: str) -> Path:
    """The interpreter that has what `requirements/NAME.txt` names."""
    wanted = HERE / "requirements" / f"{name}.txt"

    def make(at: Path) -> None:
        _run([sys.executable, "-m", "venv", str(at)])
        pip = [str(at / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        _run([*pip, "--requirement", str(wanted)])

    return _kept(name, wanted.read_bytes(), make) / "bin" / "python"


def node_modules() -> Path:
    """The directory of `node/package-lock.json`, installed."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")

    def make(at: Path) -> None:
        at.mkdir(parents=True)
        for path in (HERE / "node").glob("package*.json"):
            shutil.copy(path, at)
        _run(["npm", "ci", "--prefix", str(at), "--no-audit", "--no-fund", "--ignore-scripts"])

    return _kept("node", (HERE / "node" / "package-lock.json").read_bytes(), make)


def source_of(package: str, version: str, sha256: str) -> Path:
    """The unpacked source distribution, whose digest is checked."""

    def make(at: Path) -> None:
        at.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
        _run([*pip, f"{package}=={version}", "--dest", str(at)])
        [archive] = at.glob("*.tar.gz")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == sha256, "another file than the pinned one"
        shutil.unpack_archive(archive, at, filter="data")

    return _kept(f"{package}-source", sha256.encode(), make) / f"{package}-{version}"


def _kept(name: str, content: bytes, make: Callable[[Path], None]) -> Path:
    """A directory of the cache; one that was left half made is made again."""
    at = CACHE / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not (at / "complete").exists():
        shutil.rmtree(at, ignore_errors=True)
        at.parent.mkdir(parents=True, exist_ok=True)
        make(at)
        (at / "complete").touch()
    return at


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command[:6])} ...: {done.stderr[-400:]}")
