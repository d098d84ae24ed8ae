"""A mesh of one's own for a benchmark: started, asked for its processes and their CPU time, and ended.

Knows the command line and /proc; nothing of what is measured.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import BenchError

ROOT = Path(__file__).resolve().parents[1]
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class RunningMesh:
    state: Path
    port: int

    @property
    def key(self) -> str:
        return (self.state / "dev-key").read_text().strip()

    def pids(self) -> dict[int, str]:
        """The roles of its processes. Asking costs each of them something."""
        return {process["pid"]: process["role"] for process in self.processes() if process["pid"]}

    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(_cli("status", "--json", "--state", str(self.state)))[
            "processes"
        ]
        return found


@contextlib.contextmanager
def running_mesh(words: Sequence[str]) -> Iterator[RunningMesh]:
    """`kvmesh up` with these words, on a free port, with a state that ends with it. Raises BenchError."""
    # It is a session of its own: however this program is ended, it has to be told.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as state:
        mesh = RunningMesh(Path(state), free_port())
        try:
            _cli("up", "--detach", "--port", str(mesh.port), "--state", state, *words)
            for process in mesh.pids():
                _share_priority(process)
            yield mesh
        finally:
            _cli("down", "--state", state)


def _share_priority(process: int) -> None:
    """Gives a session of its own the standing among sessions that this one has.

    Where the kernel groups processes by session (autogroup), niceness alone says nothing across them.
    """
    with contextlib.suppress(OSError, IndexError):
        ours = Path("/proc/self/autogroup").read_text().split()[-1]
        Path(f"/proc/{process}/autogroup").write_text(ours)


def cpu_s_by_role(pids: Mapping[int, str]) -> dict[str, float]:
    """CPU seconds of every role so far, of all threads, user and system."""
    spent: dict[str, float] = defaultdict(float)
    for process, role in pids.items():
        spent[role] += cpu_s(process)
    return dict(spent)


def cpu_s(process: int) -> float:
    """CPU seconds of a process; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def environment() -> Mapping[str, str]:
    """For programs of this repository."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "KVMESH_VENV": sys.prefix}


def _cli(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mesh.cli.main", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if done.returncode and words[0] == "up":
        raise BenchError(f"kvmesh {words[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout
