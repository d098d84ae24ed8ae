"""`kvmesh restart`: one process, all of a role, or all, one after the other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mesh.cli.running import request, running_state


def run(arguments: argparse.Namespace) -> int:
    """Returns when everything that was restarted is ready again."""
    request(running_state(arguments.state), "restart", _show, name=arguments.name)
    return 0


def _show(message: Mapping[str, Any]) -> None:
    if message.get("event") == "restarted":
        finishing = "".join(f", pid {pid} finishes its work" for pid in message.get("retiring", ()))
        print(f"{message['name']} is ready again (pid {message['pid']}{finishing})", flush=True)
