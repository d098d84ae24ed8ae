"""`kvmesh down`: asks the supervisor to drain and stop, and waits until it has."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time

from mesh.cli.failure import Failure
from mesh.cli.running import request, state_of
from mesh.supervisor.state import StateDir, is_held
from mesh.supervisor.sweep import start_time, sweep

_WITHIN_S = 120.0
_LOOK_S = 0.05


def run(arguments: argparse.Namespace) -> int:
    """0 also when nothing ran; what a killed run left behind is removed."""
    state = state_of(arguments.state)
    if not is_held(state):
        found = sweep(state.root, state.run)
        print("no mesh was running" + (f"; removed what was left: {', '.join(found)}" if found else ""))
        return 0
    supervisor = int(state.lock_file.read_text().strip() or 0)
    with contextlib.suppress(Failure):
        request(state, "down")
    try:
        if not _ended(state, supervisor):
            raise Failure(f"the mesh did not stop within {_WITHIN_S:g} s; its supervisor is pid {supervisor}")
    except KeyboardInterrupt:
        # A second wish to stop: without draining.
        os.kill(supervisor, signal.SIGTERM)
        _ended(state, supervisor)
    print("stopped")
    return 0


def _ended(state: StateDir, supervisor: int) -> bool:
    """The lock is what tells, which the supervisor holds until all is gone; then it goes itself."""
    end = time.monotonic() + _WITHIN_S
    while is_held(state) or start_time(supervisor) is not None:
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True
