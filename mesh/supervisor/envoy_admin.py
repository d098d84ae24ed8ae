"""The supervisor's own line to Envoy's admin interface, and nobody else's.

Envoy's admin asks for no credential. So it listens on a socket file only until the
supervisor has connected; then the file is removed, and the open connection is the
only way in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

from mesh.supervisor.probe import connect, hang_up, read_response

_ACTIVE = "http.edge.downstream_rq_active"
_LOOK_S = 0.1


class EnvoyAdmin:
    """One kept connection; requests on it follow each other."""

    def __init__(self) -> None:
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def take_over(self, path: Path) -> None:
        """Connects to a fresh Envoy and removes its socket file. OSError if there is none."""
        await self.close()
        self._stream = await connect(f"unix:{path}")
        os.unlink(path)

    async def drain(self, within_s: float) -> bool:
        """Takes no new connections and waits until no request is running; False if some are still."""
        if await self._ask("POST", "/drain_listeners") is None:
            return True
        end = asyncio.get_running_loop().time() + within_s
        while await self._active():
            if asyncio.get_running_loop().time() > end:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def close(self) -> None:
        if self._stream is not None:
            await hang_up(self._stream[1])
            self._stream = None

    async def _active(self) -> int:
        body = await self._ask("GET", f"/stats?format=json&filter=^{_ACTIVE}$")
        if body is None:
            return 0
        stats = json.loads(body).get("stats", [])
        return int(stats[0]["value"]) if stats else 0

    async def _ask(self, method: str, path: str) -> bytes | None:
        """None when Envoy is not there (any more)."""
        if self._stream is None:
            return None
        reader, writer = self._stream
        async with self._turn:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                writer.write(f"{method} {path} HTTP/1.1\r\nhost: admin\r\ncontent-length: 0\r\n\r\n".encode())
                async with asyncio.timeout(2.0):
                    return (await read_response(reader))[1]
        return None
