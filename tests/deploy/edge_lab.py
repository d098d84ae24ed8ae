"""A real Envoy, and small servers to put behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from kvmesh.extern import ext_authz_pb2, ext_authz_pb2_grpc

from deploy.envoy import EdgeConfig, arguments, envoy_binary, write_bootstrap

GOOD_KEY = "Bearer good"
STARTUP_S = 20.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Authorization(ext_authz_pb2_grpc.AuthorizationServicer):
    """Knows one key; remembers the metadata of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[ext_authz_pb2.CheckRequest, dict[str, str]]] = []

    async def Check(
        self, request: ext_authz_pb2.CheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ext_authz_pb2.CheckResponse:
        metadata = {str(k): str(v) for k, v in context.invocation_metadata() or ()}
        self.calls.append((request, metadata))
        if request.attributes.request.http.headers.get("authorization") != GOOD_KEY:
            body = json.dumps(
                {"error": {"message": "no", "type": "authentication_error", "param": None, "code": "x"}}
            )
            denied = ext_authz_pb2.DeniedHttpResponse(status=ext_authz_pb2.HttpStatus(code=401), body=body)
            return ext_authz_pb2.CheckResponse(status=ext_authz_pb2.Status(code=16), denied_response=denied)
        identity = ext_authz_pb2.HeaderValueOption(
            header=ext_authz_pb2.HeaderValue(key="x-mesh-identity", value="minted"),
            append_action=ext_authz_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        ok = ext_authz_pb2.OkHttpResponse(headers=[identity], headers_to_remove=["authorization"])
        return ext_authz_pb2.CheckResponse(status=ext_authz_pb2.Status(code=0), ok_response=ok)


@dataclass
class Upstream:
    """Echoes each request as JSON; `seen` keeps what arrived.

    Each entry of `hang_up` is used once, to end the connection "before the answer" or
    "within the answer" to a request.
    """

    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    hang_up: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
                if headers.get("transfer-encoding") == "chunked":
                    body = await _chunks(reader)
                else:
                    body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.seen.append((head[0], headers, body))
                self._news.set()
                if self.hang_up and "/internal/otlp" not in head[0]:
                    if self.hang_up.pop() == "within the answer":
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
                        await writer.drain()
                    break
                answer = json.dumps({"line": head[0], "headers": headers, "bytes": len(body)}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                    % len(answer)
                )
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def heard(self) -> None:
        """Returns when something more has arrived."""
        self._news.clear()
        await self._news.wait()

    def requests(self) -> list[tuple[str, dict[str, str], bytes]]:
        """What arrived, without the edge's own spans."""
        return [r for r in self.seen if "/internal/otlp" not in r[0]]


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body, without trailers."""
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


@dataclass
class Edge:
    url: str
    directory: Path
    config: EdgeConfig
    authorization: Authorization
    upstream: Upstream
    log: Path

    def log_text(self) -> str:
        return self.log.read_text()


async def start_authorization(servicer: Authorization, address: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    ext_authz_pb2_grpc.add_AuthorizationServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


@contextlib.asynccontextmanager
async def running_envoy(config: EdgeConfig, directory: Path) -> AsyncIterator[Path]:
    binary = envoy_binary()
    if binary is None:
        pytest.skip("no Envoy on this platform")
    write_bootstrap(directory / "envoy.json", config)
    log = directory / "envoy.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *arguments(binary, directory / "envoy.json"),
            "--disable-hot-restart",
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        end = asyncio.get_running_loop().time() + STARTUP_S
        while True:
            assert process.returncode is None, log.read_text()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(config.host, config.port)
                writer.close()
                break
            assert asyncio.get_running_loop().time() < end, log.read_text()
            await asyncio.sleep(0.02)
        yield log
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
