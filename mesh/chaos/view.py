"""The running mesh as chaos sees and arms it: processes, pages, memory, fault rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.faults import fired_file, rules_file
from mesh.supervisor.control import ask_once
from mesh.supervisor.probe import http_get
from mesh.supervisor.state import StateDir
from mesh.telemetry.samples import Samples, parse_samples, total

_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)
_LOOK_S = 0.1


class View:
    """One mesh that was started with fault points."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._token = state.metrics_token.read_text(encoding="ascii").strip()

    async def processes(self) -> list[dict[str, Any]]:
        status = await ask_once(self._state.control_socket, "status")
        found: list[dict[str, Any]] = status["processes"]
        return found

    async def one(self, role: str, turn: int) -> dict[str, Any]:
        """The `turn`-th process of a role, round and round."""
        those = [p for p in await self.processes() if p["role"] == role]
        return those[turn % len(those)]

    async def samples(self, role: str) -> Samples:
        """The metrics of all processes of a role together; of those that answer."""
        found: Samples = []
        for process in await self.processes():
            if process["role"] == role and process["metrics_url"]:
                target, _, path = process["metrics_url"].removeprefix("http://").partition("/")
                with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(5.0):
                        code, body = await http_get(
                            target, f"/{path}", {"authorization": f"Bearer {self._token}"}
                        )
                    if code == 200:
                        found += parse_samples(body.decode())
        return found

    async def whole(self, within_s: float) -> bool:
        """Waits until every process is ready; False if one is not in time."""
        end = time.monotonic() + within_s
        while not all(p["ready"] for p in await self.processes()):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def replaced(self, name: str, pid: int) -> dict[str, Any] | None:
        """The process as it is now, if it is ready again with another pid."""
        now = next(p for p in await self.processes() if p["name"] == name)
        return now if now["ready"] and now["pid"] not in (pid, None) else None

    async def stray_pages(self) -> int:
        """Pages that somebody holds, and broken rules of the pools; 0 when nobody works."""
        samples = await self.samples("kvstore")
        held = sum(total(samples, "kvmesh_kv_pages", state=state) for state in ("leased", "quarantined"))
        return int(held + total(samples, "kvmesh_kv_invariant_violations"))

    async def clean(self, within_s: float) -> tuple[int, float]:
        """Waits until no page is held; how many still were after `within_s`, and how long it took."""
        began = time.monotonic()
        while (stray := await self.stray_pages()) and time.monotonic() - began < within_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return stray, time.monotonic() - began

    async def memory_kib(self) -> dict[str, tuple[int, int]]:
        """Pid and private memory of every process, by name."""
        return {
            p["name"]: (p["pid"], kib)
            for p in await self.processes()
            if p["pid"] and (kib := anonymous_kib(p["pid"])) is not None
        }

    def arm(self, process: Mapping[str, Any], rules: Sequence[Mapping[str, Any]]) -> None:
        """Gives a ready process its rules; what fired before is forgotten."""
        name = process["name"]
        fired_file(self._state.run, name).unlink(missing_ok=True)
        rules_file(self._state.run, name).write_text(json.dumps(list(rules)), encoding="utf-8")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], signal.SIGUSR2)

    def fired(self, process: Mapping[str, Any]) -> bool:
        """Whether a rule of the process has fired since it was armed."""
        return fired_file(self._state.run, process["name"]).exists()

    def forget(self, process: Mapping[str, Any]) -> None:
        """No rules for the next process of this name."""
        rules_file(self._state.run, process["name"]).unlink(missing_ok=True)


def anonymous_kib(pid: int) -> int | None:
    """Memory that a process shares with nobody; None where that cannot be told."""
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1])
