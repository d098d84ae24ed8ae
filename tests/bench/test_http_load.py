"""The load that costs little: it reads whole answers, counts what failed, and stops when it was told."""

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from bench.http_load import Job, load
from bench.mesh import ROOT, environment


class _Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        asked = json.loads(body)
        answer = json.dumps({"got": asked, "key": self.headers["authorization"]}).encode()
        self.send_response(asked.get("status", 200))
        if asked.get("chunked"):
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(answer), answer))
            self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_it_sends_so_many_requests_and_times_each(port: int) -> None:
    result = load(Job(port=port, path="/", clients=4, bodies=['{"a": 1}', '{"chunked": true}'], requests=21))
    assert len(result.latencies_ms) == 21
    assert result.failed == 0
    assert all(latency > 0 for latency in result.latencies_ms)
    assert result.cpu_s > 0


def test_it_stops_after_its_time(port: int) -> None:
    result = load(Job(port=port, path="/", clients=2, bodies=["{}"], seconds=0.2))
    assert 0.2 <= result.wall_s < 30
    assert len(result.latencies_ms) > 2


def test_errors_are_counted_and_told(port: int) -> None:
    result = load(Job(port=port, path="/", clients=1, bodies=["{}", '{"status": 503}'], key="k", requests=4))
    assert (len(result.latencies_ms), result.failed) == (2, 2)
    assert result.first_error is not None
    assert result.first_error.startswith("503 ")
    assert "Bearer k" in result.first_error


def test_a_server_that_hangs_up_is_an_error_of_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        job = Job(port=listener.getsockname()[1], path="/", clients=1, bodies=["{}"], requests=1)
        done = subprocess.run(
            [sys.executable, "-m", "bench.http_load"],
            input=json.dumps(asdict(job)),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(),
            check=False,
        )
    assert done.returncode
    assert "Connection" in done.stderr
