"""Asks a process whether it still answers, in plain HTTP or by the first bytes that it
sends by itself. Never gRPC: the supervisor forks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Probe(Protocol):
    """None when all is well, else the reason why not. Never raises."""

    async def __call__(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """One GET of `path`. `target` is "host:port" or "unix:/path"; `statuses` are well.

    With `tls` any certificate will do: nothing secret is sent, and nothing believed
    but that a process of ours answers.
    """

    target: str
    path: str
    statuses: tuple[int, ...] = (200,)
    headers: Mapping[str, str] | None = None
    tls: bool = False
    timeout_s: float = 1.5

    async def __call__(self) -> str | None:
        try:
            async with asyncio.timeout(self.timeout_s):
                status, body = await http_get(self.target, self.path, self.headers or {}, tls=self.tls)
        except TimeoutError:
            return f"no answer from {self.target} within {self.timeout_s:g} s"
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            return f"{self.target}: {error}"
        if status not in self.statuses:
            return (
                f"{self.target}{self.path} answered {status}: {body[:200].decode(errors='replace').strip()}"
            )
        return None


@dataclass(frozen=True, slots=True)
class GreetingProbe:
    """Connects and expects the server to speak first, as NATS does."""

    target: str
    greeting: bytes
    timeout_s: float = 1.5

    async def __call__(self) -> str | None:
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await connect(self.target)
                try:
                    got = await reader.readexactly(len(self.greeting))
                finally:
                    await hang_up(writer)
        except TimeoutError:
            return f"no answer from {self.target} within {self.timeout_s:g} s"
        except (OSError, asyncio.IncompleteReadError) as error:
            return f"{self.target}: {error}"
        return None if got == self.greeting else f"{self.target} is something else"


async def connect(target: str, *, tls: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to "host:port" or "unix:/path"; with `tls` without looking at the certificate."""
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"))
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port), ssl=_any_certificate() if tls else None)


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Closes without waiting for the other side."""
    writer.transport.abort()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await asyncio.sleep(0)


async def http_get(
    target: str, path: str, headers: Mapping[str, str], *, tls: bool = False
) -> tuple[int, bytes]:
    """Status and body of one GET on a connection of its own."""
    reader, writer = await connect(target, tls=tls)
    try:
        lines = [f"GET {path} HTTP/1.1", "host: localhost", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        return await read_response(reader)
    finally:
        await hang_up(writer)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One HTTP/1.1 response; ValueError for anything else."""
    head = await reader.readuntil(b"\r\n\r\n")
    status_line, *rest = head.decode("latin-1").split("\r\n")
    words = status_line.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1") or not words[1].isdigit():
        raise ValueError("not HTTP")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in rest if line)
    }
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return int(words[1]), await _chunks(reader)
    if "content-length" in headers:
        return int(words[1]), await reader.readexactly(int(headers["content-length"]))
    return int(words[1]), await reader.read()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body
