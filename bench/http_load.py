"""A closed loop of HTTP/1.1 clients that costs little: `python -m bench.http_load`, a job on stdin.

One thread, one kept connection per client, bodies that were made before the clock starts, answers that are
not parsed beyond their length: about 30 µs per request, so that on a shared machine the load is not what is
measured. Answers have to be whole (no streams). Knows nothing of what is asked.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load_process import serve_load

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Job:
    """`bodies` are used in turn, one per request, until `seconds` are over or `requests` have been sent."""

    port: int
    path: str
    clients: int
    bodies: Sequence[str]
    key: str = ""
    seconds: float = 10.0
    requests: int = 1 << 30


@dataclass(slots=True)
class Result:
    """`cpu_s` is what the load itself took; `latencies_ms` are of answers with status 200, as they ended."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    failed: int = 0
    first_error: str | None = None


class _Client:
    """One connection: sends, reads one answer, and again."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_at = 0.0
        self._read = bytearray()

    def send(self, request: bytes) -> None:
        self.sent_at = time.perf_counter()
        self.socket.sendall(request)

    def answer(self) -> tuple[int, bytes] | None:
        """Status and body once all is there. Raises ConnectionError."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._read += data
        head = self._read.find(b"\r\n\r\n")
        if head < 0:
            return None
        whole = _length(bytes(self._read[:head]).lower(), self._read, head + 4)
        if whole is None or len(self._read) < whole:
            return None
        status, body = int(self._read[9:12]), bytes(self._read[head + 4 : whole])
        self._read.clear()
        return status, body


def _length(head: bytes, read: bytearray, body: int) -> int | None:
    """Where the answer ends; None while that is not known."""
    at = head.find(b"content-length:")
    if at >= 0:
        return body + int(head[at + 15 :].split(b"\r\n", 1)[0])
    end = read.find(b"0\r\n\r\n", body)
    return None if end < 0 else end + 5


def load(job: Job) -> Result:
    requests = [_request(job, body.encode()) for body in job.bodies]
    result = Result()
    selector = selectors.DefaultSelector()
    clients = [_Client(job.port) for _ in range(min(job.clients, job.requests))]
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
    cpu, start = time.process_time(), time.perf_counter()
    sent = 0
    for client in clients:
        client.send(requests[sent % len(requests)])
        sent += 1
    waiting = len(clients)
    end = start + job.seconds
    while waiting:
        for key, _ in selector.select():
            client = key.data
            answer = client.answer()
            if answer is None:
                continue
            now = time.perf_counter()
            waiting -= 1
            if answer[0] == 200:
                result.latencies_ms.append((now - client.sent_at) * 1e3)
            else:
                result.failed += 1
                result.first_error = (
                    result.first_error or f"{answer[0]} {answer[1][:200].decode(errors='replace')}"
                )
            if now < end and sent < job.requests:
                client.send(requests[sent % len(requests)])
                sent += 1
                waiting += 1
    result.wall_s = time.perf_counter() - start
    result.cpu_s = time.process_time() - cpu
    return result


def _request(job: Job, body: bytes) -> bytes:
    lines = [f"POST {job.path} HTTP/1.1", f"host: 127.0.0.1:{job.port}", "content-type: application/json"]
    if job.key:
        lines.append(f"authorization: Bearer {job.key}")
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


if __name__ == "__main__":
    serve_load(load, Job)
