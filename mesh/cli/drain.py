"""`kvmesh drain`: a process takes no new work, finishes or moves what it has, and ends."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mesh.cli.running import request, running_state


def run(arguments: argparse.Namespace) -> int:
    """Returns when it has ended. `kvmesh restart NAME` brings it back."""
    state = running_state(arguments.state)
    request(state, "drain", _show, name=arguments.name, within_s=arguments.within, force=arguments.force)
    return 0


def _show(message: Mapping[str, Any]) -> None:
    if message.get("event") == "drained":
        print(f"{message['name']} is drained", flush=True)
