"""How the CLI talks to the supervisor: JSON lines on a Unix socket in the private
runtime directory.

One request per connection, `{"command": NAME, …}`. The answer is any number of
`{"event": …}` lines while it works and one last line, `{"ok": …}` or
`{"error": text}`. Only the uid that owns the supervisor is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

Emit = Callable[[Mapping[str, Any]], None]
Command = Callable[[Mapping[str, Any], Emit], Awaitable[Mapping[str, Any]]]


class ControlError(Exception):
    """The supervisor refused, or there is none; the message says why."""


class ControlServer:
    """Serves `commands` on `path` until `close`."""

    def __init__(self, path: Path, commands: Mapping[str, Command]) -> None:
        self._path = path
        self._commands = commands
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Lets answers that are being given finish."""
        if self._server is not None:
            self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)
        for task in self._connections:
            task.cancel()
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def emit(message: Mapping[str, Any]) -> None:
            writer.write(json.dumps(message).encode() + b"\n")

        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            try:
                if not _same_user(writer):
                    emit({"error": "not the owner of this mesh"})
                    return
                request = json.loads(await reader.readline())
                command = self._commands.get(request.get("command", ""))
                if command is None:
                    emit({"error": f"unknown command {request.get('command')!r}"})
                else:
                    emit({"ok": await command(request, emit)})
            except ControlError as error:
                emit({"error": str(error)})
            finally:
                await writer.drain()
                writer.close()


def _same_user(writer: asyncio.StreamWriter) -> bool:
    if sys.platform != "linux":
        # The directory's mode is the boundary there.
        return True
    peer: socket.socket = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid in (os.geteuid(), 0)


async def ask(path: Path, command: str, **arguments: Any) -> AsyncIterator[Mapping[str, Any]]:
    """The supervisor's lines; the last one has "ok". Raises ControlError."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        raise ControlError("no mesh is running there; start one with 'kvmesh up'") from None
    try:
        writer.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        await writer.drain()
        while line := await reader.readline():
            message: Mapping[str, Any] = json.loads(line)
            if "error" in message:
                raise ControlError(str(message["error"]))
            yield message
            if "ok" in message:
                return
        raise ControlError("the supervisor ended before it answered")
    finally:
        writer.close()


async def ask_once(path: Path, command: str, **arguments: Any) -> Mapping[str, Any]:
    """The content of "ok". Raises ControlError."""
    async for message in ask(path, command, **arguments):
        if "ok" in message:
            answer: Mapping[str, Any] = message["ok"]
            return answer
    raise ControlError("the supervisor ended before it answered")
