"""Cleans up after a supervisor that could not: `python -I guardian.py ROOT RUN`

Sleeps in one read on its standard input, a pipe whose other end only the supervisor
holds. When the supervisor dies, however that happens, the read ends; then whatever
is left of its processes is killed, and its sockets and shared memory are removed.
One line "done" tells it that the supervisor cleaned up itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(root: str, run: str) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    print("ready", flush=True)
    if b"done" in sys.stdin.buffer.read():
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from mesh.supervisor.state import StateDir, StateError, held
    from mesh.supervisor.sweep import sweep

    state = StateDir(Path(root), Path(run))
    try:
        with held(state, patience_s=0.0):
            sweep(state.root, state.run)
    except StateError:
        # The next supervisor is here already, and cleans up itself.
        return


if __name__ == "__main__":
    main(*sys.argv[1:3])
