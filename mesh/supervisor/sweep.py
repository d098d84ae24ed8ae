"""Removes what a dead run left: processes, sockets, shared memory.

Processes are known by pid *and* start time, so that a pid that was given to somebody
else is never touched. Must only be called when no supervisor lives on the state
directory. Runs in the guardian too, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import stat
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Where the stores of further nodes on one machine have what is theirs.
NODES = "nodes"
LINUX = platform.system() == "Linux"
_GONE_WITHIN_S = 5.0
_EDGE_STARTS = 64


def sweep(root: Path, run: Path) -> list[str]:
    """Cleans up after the run of state directory `root`; what was found, in words."""
    found = _kill_survivors(root / "pids")
    found += remove_sockets(run)
    found += remove_arenas(root)
    _remove_edges(root)
    with contextlib.suppress(OSError):
        (root / "pids").unlink()
    return found


def remove_sockets(run: Path) -> list[str]:
    """Removes a run's directory of sockets and configurations, if it is ours."""
    try:
        if run.lstat().st_uid != os.geteuid():
            return []
        sockets = [p.name for p in run.iterdir() if stat.S_ISSOCK(p.lstat().st_mode)]
    except OSError:
        return []
    shutil.rmtree(run, ignore_errors=True)
    return [f"socket {name}" for name in sockets]


def arena_prefix(root: Path) -> str:
    """How the names of this state directory's shared-memory files begin."""
    digest = blake2b(os.fsencode(root.absolute()), digest_size=8).hexdigest()
    return f"kvmesh-{os.geteuid()}-{digest}-"


def remove_arenas(root: Path) -> list[str]:
    """Removes the shared memory of a state directory's KV stores, those of all its nodes."""
    removed = []
    with contextlib.suppress(OSError):
        for node in (root / NODES).iterdir():
            removed += remove_arenas(node)
    for directory in (SHARED_MEMORY, root / "shm"):
        with contextlib.suppress(OSError):
            for path in directory.iterdir():
                if path.name.startswith(arena_prefix(root)):
                    with contextlib.suppress(OSError):
                        if path.is_dir() and not path.is_symlink():
                            shutil.rmtree(path)
                        else:
                            path.unlink()
                        removed.append(f"shared memory {path.name}")
    return removed


def edge_ids(root: Path) -> range:
    """Envoys that take over from each other share a little memory; these ids of it are ours."""
    digest = blake2b(os.fsencode(root.absolute()), digest_size=4, person=b"edge").digest()
    return range(_EDGE_STARTS * (int.from_bytes(digest, "big") % 2**21), _EDGE_STARTS * 2**21)[:_EDGE_STARTS]


def _remove_edges(root: Path) -> None:
    for number in edge_ids(root):
        with contextlib.suppress(OSError):
            # Envoy's name for it ends with a digit for the generation that made it.
            (SHARED_MEMORY / f"envoy_shared_memory_{number}0").unlink()


def start_time(pid: int) -> str | None:
    """When a process began, in the kernel's own count; None if it is gone."""
    if LINUX:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        state, *rest = text.rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    with contextlib.suppress(Exception):
        import psutil

        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.create_time():.2f}"
    return None


def record(path: Path, pids: Iterable[int]) -> None:
    """Writes the processes of this run where `sweep` finds them."""
    lines = [f"{pid} {began}\n" for pid in pids if (began := start_time(pid)) is not None]
    scratch = path.with_name(path.name + ".new")
    scratch.write_text("".join(lines))
    scratch.replace(path)


def _kill_survivors(path: Path) -> list[str]:
    try:
        entries = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    known = [(int(entry[0]), entry[1]) for entry in entries if len(entry) == 2]
    alive = [pid for pid, began in known if pid != os.getpid() and start_time(pid) == began]
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _GONE_WITHIN_S
    while any(start_time(pid) is not None for pid in alive) and time.monotonic() < end:
        time.sleep(0.02)
    return [f"process {pid}" for pid in alive]
