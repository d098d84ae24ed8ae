"""What the supervisor tells while it works: for the terminal, for `up --detach`, for its log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from mesh.supervisor.logfile import LogFile

Event = Mapping[str, Any]
Listener = Callable[[Event], None]


class Reporter:
    """Hands each event to the listeners and writes it to the supervisor's log."""

    def __init__(self, log: LogFile, listeners: list[Listener]) -> None:
        self._log = log
        self._listeners = listeners

    def __call__(self, event: str, **fields: Any) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = {"time": stamp, "service": "supervisor", "event": event, **fields}
        self._log.write(json.dumps(line, default=str).encode() + b"\n")
        for listener in self._listeners:
            listener({"event": event, **fields})

    def note(self, text: str) -> None:
        """Something worth a line."""
        self("note", text=text)
