"""Dynamo as it is set up to measure its own overhead: a frontend with a KV-aware router and mock workers.

Two prefill and two decode mockers of unlimited speed whose transfers take no time, file discovery, TCP and
ZMQ, so that it needs no further server. Lives in an environment of its own. Knows nothing of measuring.
"""

import contextlib
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.command import BenchError
from bench.mesh import free_port

HOW = """Dynamo is missing (--dynamo DIR):
  python3 -m venv DIR && DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
  DIR/bin/pip install msgspec pyzmq transformers tokenizers uvloop prometheus-client redis zstandard
  DIR/bin/pip install kubernetes pydantic"""
_START_S = 120.0


class Dynamo:
    """`pids` are its processes by role: dynamo_frontend, dynamo_prefill, dynamo_decode."""

    def __init__(self, port: int, pids: Mapping[int, str]) -> None:
        self.port = port
        self.pids = pids


@contextlib.contextmanager
def running_dynamo(environment: Path, model: Path, name: str) -> Iterator[Dynamo]:
    """Serves `name` with the tokenizer and template of a Hugging Face directory. Raises BenchError."""
    python = environment.absolute() / "bin" / "python"
    if not python.exists():
        raise BenchError(HOW)
    if not (model / "tokenizer.json").exists():
        raise BenchError(f"--text {model}: Dynamo needs a Hugging Face directory with a tokenizer.json")
    port = free_port()
    mocker = ["-m", "dynamo.mocker", "--model-path", str(model.absolute()), "--model-name", name]
    mocker += ["--num-workers", "2", "--speedup-ratio", "0", "--kv-transfer-bandwidth", "0"]
    mocker += ["--max-num-seqs", "512"]
    bootstrap = f"{free_port()},{free_port()}"
    commands = {
        "dynamo_prefill": [*mocker, "--disaggregation-mode", "prefill", "--bootstrap-ports", bootstrap],
        "dynamo_decode": [*mocker, "--disaggregation-mode", "decode"],
        "dynamo_frontend": ["-m", "dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"],
    }
    with tempfile.TemporaryDirectory(prefix="kvmesh-dynamo-") as directory, contextlib.ExitStack() as stack:
        settings = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_FILE_KV": directory,
            "HF_HUB_OFFLINE": "1",
        }
        pids: dict[int, str] = {}
        for role, words in commands.items():
            log = stack.enter_context((Path(directory) / f"{role}.log").open("wb"))
            process = subprocess.Popen(
                [str(python), *words], env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(_end, process)
            pids[process.pid] = role
        _await(port, name)
        yield Dynamo(port, pids)


def _await(port: int, name: str) -> None:
    """Until the frontend knows both kinds of workers: it names the model, and answers."""
    end = time.monotonic() + _START_S
    body = (
        f'{{"model": "{name}", "messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1}}'.encode()
    )
    while time.monotonic() < end:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310
                return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.5)
    raise BenchError(f"Dynamo did not answer within {_START_S:.0f} s")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
