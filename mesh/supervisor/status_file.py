"""What a service says of itself in `<run>/<name>.json`: its pid, addresses, readiness."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.supervisor.probe import HttpProbe


def read_status(path: Path) -> dict[str, Any]:
    """The file's content; empty while there is none."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


@dataclass(frozen=True, slots=True)
class StatusFileProbe:
    """Ready when the service wrote that it is."""

    path: Path

    async def __call__(self) -> str | None:
        status = read_status(self.path)
        if not status:
            return "it has not started yet"
        return None if status.get("ready") is True else "it says that it is not ready yet"


@dataclass(frozen=True, slots=True)
class ServiceAliveProbe:
    """Asks the service's metrics port, without its token: a refusal is an answer."""

    path: Path

    async def __call__(self) -> str | None:
        url = str(read_status(self.path).get("metrics_url", ""))
        target = url.removeprefix("http://").partition("/")[0]
        if not target:
            return "it does not say where its metrics are"
        return await HttpProbe(target, "/", statuses=(401,))()
