"""The running mesh of a state directory, as the commands need it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mesh.cli.failure import NOT_RUNNING, Failure
from mesh.cli.style import readable
from mesh.supervisor.control import ControlError, ask
from mesh.supervisor.state import StateDir, StateError, existing_state, is_held

Listen = Callable[[Mapping[str, Any]], None]


def state_of(root: Path) -> StateDir:
    """The state directory; Failure when there is none."""
    try:
        return existing_state(root)
    except StateError as error:
        raise Failure(str(error), status=NOT_RUNNING) from None


def running_state(root: Path) -> StateDir:
    """The state directory of a mesh that runs; Failure when none does."""
    state = state_of(root)
    if not is_held(state):
        raise Failure(f"no mesh is running on {state.root}; start one with 'kvmesh up'", status=NOT_RUNNING)
    return state


def request(
    state: StateDir, command: str, listen: Listen = lambda _: None, **arguments: Any
) -> Mapping[str, Any]:
    """The supervisor's answer; `listen` hears what it tells meanwhile."""

    async def talk() -> Mapping[str, Any]:
        answer: Mapping[str, Any] = {}
        async for message in ask(state.control_socket, command, **arguments):
            if "ok" in message:
                answer = message["ok"]
            else:
                listen(message)
        return answer

    try:
        return asyncio.run(talk())
    except ControlError as error:
        # Some reasons end with log lines of the process at fault.
        raise Failure("\n".join(map(readable, str(error).splitlines()))) from None


def status_of(state: StateDir) -> Mapping[str, Any]:
    """What the supervisor knows of its processes."""
    return request(state, "status")
