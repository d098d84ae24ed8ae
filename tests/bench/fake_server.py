"""A server that streams what it is told, and remembers what it was asked."""

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self


@dataclass
class FakeServer:
    """`slow_every`: each such request waits `slow_s` before its last piece."""

    tokens: int = 1
    first_s: float = 0.0
    gap_s: float = 0.0
    slow_every: int = 0
    slow_s: float = 0.0
    status: int = 200
    broken: bool = False
    failing: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            head = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            self.heads.append(head | {"path": first.split()[1]})
            self.bodies.append(json.loads(await reader.readexactly(int(head["content-length"]))))
            await self._stream(writer, len(self.bodies))
        finally:
            self._now -= 1
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, number: int) -> None:
        head = f"HTTP/1.1 {self.status} X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        if self.status == 200:
            await asyncio.sleep(self.first_s)
            for token in range(self.tokens):
                if token == self.tokens - 1 and self.slow_every and number % self.slow_every == 0:
                    await asyncio.sleep(self.slow_s)
                elif token:
                    await asyncio.sleep(self.gap_s)
                self._event(writer, {"choices": [{"text": "a", "delta": {"content": "a"}}]})
            if self.failing:
                self._event(writer, {"error": {"message": "out of luck"}})
            elif not self.broken:
                usage = {"prompt_tokens": 11, "completion_tokens": self.tokens}
                self._event(writer, {"choices": [], "usage": usage})
                self._chunk(writer, b"data: [DONE]\n\n")
        else:
            self._chunk(writer, b'{"error": "no"}')
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, f"data: {json.dumps(event)}\n\n".encode())

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
