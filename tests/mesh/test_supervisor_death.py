"""A supervisor that is killed leaves nothing: no process, no socket, no shared memory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesh.supervisor.state import create_state, is_held
from mesh.supervisor.sweep import SHARED_MEMORY, arena_prefix, start_time

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 20.0

SUPERVISOR = """
import asyncio, json, os, sys
from pathlib import Path
from mesh.supervisor.process import Process, ProcessSpec
from mesh.supervisor.state import create_state, held
from mesh.supervisor.sweep import record
from mesh.supervisor.watchdog import Guardian

class Ready:
    async def __call__(self): return None

async def main():
    state = create_state(Path(sys.argv[1]))
    with held(state):
        guardian = Guardian(state)
        await guardian.start()
        deaf = "import signal, time\\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\\ntime.sleep(600)"
        argv = (sys.executable, "-I", "-c", deaf)
        spec = ProcessSpec("dummy-0", "decode", argv, Ready(), Ready(), state.logs / "d.log")
        process = Process(spec, lambda _: None)
        process.start()
        await process.ready.wait()
        record(state.pids, [process.pid, guardian.pid])
        print(json.dumps({"child": process.pid, "guardian": guardian.pid}), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def gone(pid: int) -> bool:
    end = time.monotonic() + WITHIN_S
    while start_time(pid) is not None:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("stop_guardian", [False, True])
def test_nothing_is_left_after_sigkill(tmp_path: Path, stop_guardian: bool) -> None:
    state = create_state(tmp_path / "s")
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(state.root)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout is not None
    pids = json.loads(supervisor.stdout.readline())
    arena = SHARED_MEMORY / (arena_prefix(state.root) + "test")
    arena.write_bytes(b"pages")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(state.run / "decode-0.sock"))
    try:
        if stop_guardian:
            # Signals that end whole sessions (a closed terminal) do not end the guardian.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pids["guardian"], number)
        supervisor.kill()
        supervisor.wait()
        assert gone(pids["child"])
        assert gone(pids["guardian"])
        assert not state.run.exists()
        assert not arena.exists()
        assert not is_held(state)
    finally:
        supervisor.stdout.close()
        arena.unlink(missing_ok=True)
        for pid in pids.values():
            if start_time(pid) is not None:
                os.kill(pid, signal.SIGKILL)
