"""One streamed completion over HTTP/1.1, with the time of every event that brings text.

Small on purpose: where the load shares the machine with the server, every microsecond spent here is the
server's loss. Knows the OpenAI dialect, and nothing of how requests are spread over time.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from bench.command import BenchError

_READ_BYTES = 1 << 16


@dataclass(slots=True)
class Sample:
    """What became of one request. Times by `time.perf_counter`, in seconds."""

    due_s: float
    """When it was to be sent; waiting for a connection counts as the server's time."""
    stamps_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str, *, path: str, key: str, ca: str | None) -> "Target":
        """`url` with or without the `/v1` at its end. Raises BenchError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BenchError(f"{url!r} is no http or https URL")
        tls = None
        if parts.scheme == "https":
            try:
                tls = ssl.create_default_context(cafile=ca)
            except OSError as error:
                raise BenchError(f"{ca}: {error}") from error
        headers = {"host": parts.netloc, "content-type": "application/json", "connection": "close"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1") + path, headers, tls)


async def stream(target: Target, body: Mapping[str, Any], sample: Sample, timeout_s: float) -> None:
    """Sends `body` and reads to the end; a failure becomes the sample's `error`."""
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(target, body, sample)
    except (OSError, httptools.HttpParserError, json.JSONDecodeError) as error:
        # TimeoutError is an OSError. A failed request is a figure, not a crash.
        sample.error = sample.error or repr(error)[:200]
    sample.end_s = time.perf_counter()


async def _exchange(target: Target, body: Mapping[str, Any], sample: Sample) -> None:
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    try:
        lines = [f"POST {target.path} HTTP/1.1", *(f"{k}: {v}" for k, v in target.headers.items())]
        head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""])
        writer.write(head.encode() + content)
        answer = _Answer(sample)
        parser = httptools.HttpResponseParser(answer)
        answer.status = parser.get_status_code
        while not answer.complete and (data := await reader.read(_READ_BYTES)):
            parser.feed_data(data)
        answer.finish()
    finally:
        writer.close()


class _Answer:
    """What the parser calls."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._left = b""
        self._done = False
        self.status: Any = None
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self._left += data
        if self.status() != 200:
            return
        *lines, self._left = self._left.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self.complete = True

    def finish(self) -> None:
        if self._sample.error is None and not self._done:
            if self.status is not None and self.complete and self.status() != 200:
                self._sample.error = f"{self.status()} {self._left[:200].decode(errors='replace')}"
            else:
                self._sample.error = "the stream ended without [DONE]"

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._sample.error = str(event["error"])[:200]
            return
        if usage := event.get("usage"):
            self._sample.prompt_tokens = usage.get("prompt_tokens", 0)
            self._sample.completion_tokens = usage.get("completion_tokens", 0)
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                self._sample.stamps_s.append(time.perf_counter())
                return
