"""Streams that stay smooth: so many at once, so many tokens a second each, through a whole mesh.

The decode worker's model says what it is told, at a fixed pace; everything else runs as always. Every token
has a time at which it is due: so many after its stream's earliest. The bar is a p99 lateness of 50 ms.

  streams              that ran at once
  late_p50_ms …        how late tokens came, over all streams, once all had begun
  tok_s, wanted_tok_s  tokens a second that came, and that were to come
  tokens_per_read      how much was joined on the way (1: every token came alone)
  ROLE_cores           processors that the processes of a role kept busy; `load`: the load itself

--find halves the distance between what holds the bar and what does not, beginning with --streams.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.command import BenchError, Row
from bench.load_process import run_load
from bench.mesh import RunningMesh, cpu_s_by_role, running_mesh
from bench.overhead import MODEL, PATH
from bench.stream_load import StreamJob, StreamResult

BAR_MS = 50.0
_TRIES = 5
_RAMP_S = 4.0
_SAID = "abcdefghij"
"""Short enough to be no whole block: prefill has no part in this."""

_CONFIG = """
[decode]
max_seqs = {seqs}
step_tokens = {tokens}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="default 1000")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of a stream (default 50)")
    parser.add_argument("--seconds", type=float, default=60.0, help="after all have begun (default 60)")
    parser.add_argument("--router", type=int, default=1, help="router processes (default 1)")
    parser.add_argument("--find", action="store_true", help="the highest count that holds the bar")


def run(arguments: argparse.Namespace) -> Row:
    if min(arguments.streams, arguments.router) < 1 or min(arguments.rate, arguments.seconds) <= 0:
        raise BenchError("--streams, --rate, --seconds and --router: above 0")
    with tempfile.TemporaryDirectory() as directory, running_mesh(_words(arguments, Path(directory))) as mesh:
        pids = mesh.pids()
        row = _measure(mesh, pids, arguments, arguments.streams)
        if not arguments.find:
            return row
        best, holds, breaks = row, 0, 2 * arguments.streams
        for _ in range(_TRIES):
            if _held(row):
                best, holds = row, int(str(row["streams"]))
            else:
                breaks = int(str(row["streams"]))
            if breaks - holds <= max(1, breaks // 16):
                break
            row = _measure(mesh, pids, arguments, (holds + breaks) // 2)
        return best if _held(best) else row


def _words(arguments: argparse.Namespace, directory: Path) -> list[str]:
    most = 2 * arguments.streams
    config = directory / "streams.toml"
    config.write_text(_CONFIG.format(seqs=most, tokens=2 * most + 256), encoding="utf-8")
    words = ["--model", f"{MODEL}=script:check=tail", "--router", str(arguments.router), "--kv-memory", "1G"]
    return [*words, "--config", str(config)]


def _held(row: Row) -> bool:
    return float(str(row["late_p99_ms"])) <= BAR_MS and not row["failed"]


def _measure(mesh: RunningMesh, pids: Mapping[int, str], arguments: argparse.Namespace, streams: int) -> Row:
    seconds = _RAMP_S + arguments.seconds
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": _SAID}],
        "stream": True,
        "temperature": 0,
        "max_tokens": int((seconds + _RAMP_S) * arguments.rate),
        "metadata": {"script_pace_ms": f"{1e3 / arguments.rate:g}", "script_repeat": "1"},
    }
    job = StreamJob(
        port=mesh.port,
        path=PATH,
        streams=streams,
        body=json.dumps(body),
        key=mesh.key,
        rate=arguments.rate,
        ramp_s=_RAMP_S,
        seconds=arguments.seconds,
    )
    before = cpu_s_by_role(pids)
    result = StreamResult(**run_load("bench.stream_load", job))
    if not result.tokens:
        raise BenchError(f"no stream gave a token: {result.first_error}")
    spent = cpu_s_by_role(pids)
    return {
        "streams": streams,
        "failed": result.failed,
        "first_error": result.first_error,
        "late_p50_ms": result.late_p50_ms,
        "late_p99_ms": result.late_p99_ms,
        "late_max_ms": result.late_max_ms,
        "tok_s": result.tokens / (result.wall_s - _RAMP_S / 2),
        "wanted_tok_s": streams * arguments.rate,
        "tokens_per_read": result.tokens / max(1, result.reads),
        **{f"{role}_cores": (spent[role] - before.get(role, 0.0)) / result.wall_s for role in spent},
        "load_cores": result.cpu_s / result.wall_s,
    }
