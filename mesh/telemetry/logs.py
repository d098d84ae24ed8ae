"""Logs: one JSON object per line on standard output; the supervisor stores and rotates them.

A line is formatted and written by a thread that sleeps until there is one, so a
slow reader never stops the service's loop. Exceptions are logged as type and
places; the message only for types whose message cannot quote a user's text.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any

from opentelemetry import trace

_BACKLOG = 10_000
_SAFE_MESSAGES = (OSError, TypeError, AttributeError, ImportError, AssertionError, NotImplementedError)
_STANDARD = set(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}

_request_id: ContextVar[str | None] = ContextVar("kvmesh_request_id", default=None)


@contextmanager
def bind_request_id(request_id: str) -> Iterator[None]:
    """Every line logged inside, in this task and its children, names the request."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


class _Stamp(logging.Filter):
    """Takes the ids where the line is logged: the writing thread has no context."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = getattr(record, "request_id", None) or _request_id.get()
        context = trace.get_current_span().get_span_context()
        record.trace_id = f"{context.trace_id:032x}" if context.is_valid else None
        return True


class JsonFormatter(logging.Formatter):
    """`extra={...}` of a logging call becomes fields of the line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = vars(record).items()
        line |= {key: value for key, value in extra if key not in _STANDARD and value is not None}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = describe(record.exc_info[1])
        return json.dumps(line, default=str, ensure_ascii=False)


def describe(error: BaseException) -> dict[str, Any]:
    """Type, places and, where it is safe, the message."""
    frames = traceback.extract_tb(error.__traceback__)
    result: dict[str, Any] = {
        "type": type(error).__qualname__,
        "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]],
    }
    if isinstance(error, _SAFE_MESSAGES):
        result["message"] = str(error)[:300]
    return result


class _Handover(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            # Losing lines is better than losing requests.
            pass


class _Output(logging.StreamHandler[IO[str]]):
    def handleError(self, record: logging.LogRecord) -> None:
        # Nobody reads any more: the supervisor is gone, and this process follows it.
        pass


def configure_logging(service: str, *, level: str | None = None) -> logging.handlers.QueueListener:
    """Sends all logging of the process to standard output as JSON; `stop()` the result at the end."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_BACKLOG)
    output = _Output(sys.stdout)
    output.setFormatter(JsonFormatter(service))
    listener = logging.handlers.QueueListener(lines, output)
    handover = _Handover(lines)
    handover.addFilter(_Stamp())
    root = logging.getLogger()
    root.handlers[:] = [handover]
    root.setLevel((level or os.environ.get("KVMESH_LOG_LEVEL", "INFO")).upper())
    # httpx and nats write a line per call at INFO; a collector that is away is told once per batch.
    for chatty in ("httpx", "nats", "grpc", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    listener.start()
    return listener
