"""Many streams at once and when their tokens came: `python -m bench.stream_load`, a job on stdin.

One thread, one connection per stream. Text is searched for by its key and counted by its length, so that
coalesced tokens count as what they are: this is for texts of one byte to a token that need no escapes.
Knows nothing of what is asked.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load_process import serve_load
from bench.serve import percentile

_READ_BYTES = 1 << 16
_TEXT = re.compile(rb'"content":"([^"]+)"')
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class StreamJob:
    """`streams` begin within `ramp_s`; each token is due `1 / rate` after the one before."""

    port: int
    path: str
    streams: int
    body: str
    key: str
    rate: float
    ramp_s: float
    seconds: float


@dataclass(slots=True)
class StreamResult:
    """Lateness: of every token that came once all streams had begun, after its stream's own schedule.

    The schedule is the one on which that stream's earliest token was on time.
    """

    tokens: int = 0
    reads: int = 0
    late_p50_ms: float = 0.0
    late_p99_ms: float = 0.0
    late_max_ms: float = 0.0
    ended: int = 0
    failed: int = 0
    first_error: str | None = None
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(slots=True)
class _Stream:
    socket: socket.socket
    tail: bytes = b""
    count: int = 0
    # When tokens came, by number: of each read its time and the tokens so far.
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    done: bool = False

    def read(self, now: float) -> bool:
        """False at the end of the connection."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            return False
        text = self.tail + data
        # Whole events only; the rest waits for its end.
        end = text.rfind(b"\n\n") + 2
        if end < 2:
            self.tail = text
            return True
        self.tail = text[end:]
        events = text[:end]
        found = sum(map(len, _TEXT.findall(events)))
        if found:
            self.count += found
            self.times.append(now)
            self.counts.append(self.count)
        if _END in events:
            self.done = True
        return True


def load(job: StreamJob) -> StreamResult:
    request = _request(job)
    result = StreamResult()
    selector = selectors.DefaultSelector()
    cpu, start = time.process_time(), time.perf_counter()
    streams: list[_Stream] = []
    running = 0
    end = start + job.ramp_s + job.seconds
    while time.perf_counter() < end:
        due = (time.perf_counter() - start) / job.ramp_s * job.streams if job.ramp_s else job.streams
        while len(streams) < min(job.streams, due):
            stream = _Stream(socket.create_connection(("127.0.0.1", job.port)))
            stream.socket.sendall(request)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
            streams.append(stream)
            running += 1
        for key, _ in selector.select(0.005 if len(streams) < job.streams else 0.2):
            stream = key.data
            result.reads += 1
            if not stream.read(time.perf_counter()) or stream.done:
                selector.unregister(stream.socket)
                running -= 1
                if not stream.done and result.first_error is None:
                    result.first_error = stream.tail[-300:].decode(errors="replace")
        if not running and len(streams) == job.streams:
            break
    result.wall_s = time.perf_counter() - start
    result.cpu_s = time.process_time() - cpu
    _judge(job, streams, start + job.ramp_s, result)
    for stream in streams:
        stream.socket.close()
    return result


def _judge(job: StreamJob, streams: Sequence[_Stream], since: float, result: StreamResult) -> None:
    late: list[float] = []
    for stream in streams:
        result.tokens += stream.count
        result.ended += stream.done
        if not stream.count:
            result.failed += 1
            continue
        late += lateness_ms(stream.times, stream.counts, job.rate, since)
    if late:
        result.late_p50_ms, result.late_p99_ms = percentile(late, 50), percentile(late, 99)
        result.late_max_ms = max(late)


def lateness_ms(times: Sequence[float], counts: Sequence[int], rate: float, since: float) -> list[float]:
    """Of each token from `since` on. `times[i]` is when the tokens up to number `counts[i]` were there."""
    at: list[float] = []
    before = 0
    for moment, count in zip(times, counts, strict=True):
        if moment >= since:
            at += [moment - number / rate for number in range(before, count)]
        before = count
    best = min(at, default=0.0)
    return [(moment - best) * 1e3 for moment in at]


def _request(job: StreamJob) -> bytes:
    lines = [f"POST {job.path} HTTP/1.1", f"host: 127.0.0.1:{job.port}", "content-type: application/json"]
    lines += [f"authorization: Bearer {job.key}", f"content-length: {len(job.body)}", "", ""]
    return "\r\n".join(lines).encode() + job.body.encode()


if __name__ == "__main__":
    serve_load(load, StreamJob)
