"""What workers on one machine cost each other, measured with real steps in processes of their own.

  busy_slowdown_x             one thread whose core a busy process shares: how many times slower
  busy_cpu_share_pct            the share of the core it still got
  busy_kept_pct                 tokens per second of CPU it got, of those it makes alone: 100 means that it
                                loses its share of the core and nothing more
  pair_sum_pct                two workers at once, --pair-threads each, speeds as shares of their speeds
                                alone: 100 means that two take as long as one after the other
  pair_<role>_pct             the two of it: a decode worker beside a prefill worker, with the mesh's niceness
  nice_share_pct              the decode worker's share of a core that it and the prefill worker both want

Linux only: it holds processes to cores.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.command import BenchError, Row
from bench.loaded import add_model_arguments, model_path
from mesh.processors import allowed
from mesh.supervisor.plan import NICE

ROOT = Path(__file__).resolve().parents[1]
_SPIN = "import time\nprint('ready', flush=True)\ninput()\nwhile True: pass"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, model="pkg:smollm2")
    parser.add_argument("--seconds", type=float, default=5.0, help="each measurement takes (default 5)")
    parser.add_argument("--pair-threads", type=int, default=len(allowed()), help="default: all processors")


def run(arguments: argparse.Namespace) -> Row:
    if not hasattr(os, "sched_setaffinity"):
        raise BenchError("this system cannot hold processes to cores")
    arguments.model = model_path(arguments.model)
    one, every = allowed()[:1], allowed()
    alone = _together(arguments, [("decode", 1, one, 0)])[0]
    with _spinning(one):
        busy = _together(arguments, [("decode", 1, one, 0)])[0]
    threads = arguments.pair_threads
    pair = [(role, threads, every, NICE[role]) for role in ("decode", "prefill")]
    single = [_together(arguments, [each])[0] for each in pair]
    both = _together(arguments, pair)
    shares = [now["tok_s"] / then["tok_s"] for now, then in zip(both, single, strict=True)]
    wanted = _together(arguments, [(role, 1, one, NICE[role]) for role in ("decode", "prefill")])
    return {
        "model": arguments.model,
        "cpus": len(every),
        "seconds": arguments.seconds,
        "alone_tok_s": alone["tok_s"],
        "busy_tok_s": busy["tok_s"],
        "busy_slowdown_x": alone["tok_s"] / busy["tok_s"],
        "busy_cpu_share_pct": 100 * busy["cpu_s"] / busy["wall_s"],
        "busy_kept_pct": 100 * busy["tok_cpu_s"] / alone["tok_cpu_s"],
        "pair_threads": threads,
        "pair_decode_pct": 100 * shares[0],
        "pair_prefill_pct": 100 * shares[1],
        "pair_sum_pct": 100 * sum(shares),
        "nice_share_pct": 100 * wanted[0]["cpu_s"] / sum(each["cpu_s"] for each in wanted),
    }


Plan = tuple[str, int, Sequence[int], int]
"""Role, threads, processors, niceness."""


def _together(arguments: argparse.Namespace, plans: Sequence[Plan]) -> list[Mapping[str, float]]:
    """Starts all, lets them work for the same seconds, and returns what each did."""
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(arguments, plan)) for plan in plans]
        for worker in workers:
            _ready(worker)
        start = time.time() + 0.2
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{start}\n")
            worker.stdin.flush()
        return [_result(worker) for worker in workers]


def _worker(arguments: argparse.Namespace, plan: Plan) -> subprocess.Popen[str]:
    role, threads, cpus, nice = plan
    words = {
        "model": arguments.model,
        "kv_dtype": arguments.kv_dtype,
        "seconds": arguments.seconds,
        "role": role,
        "threads": threads,
        "cpus": list(cpus),
        "nice": nice,
    }
    return _start(["-m", "bench.neighbour", json.dumps(words)])


def _spinning(cpus: Sequence[int]) -> subprocess.Popen[str]:
    """A process that does nothing but use these processors; to be left as a context."""
    held = f"import os\nos.sched_setaffinity(0, {list(cpus)})\n"
    spinner = _Ended(["-c", held + _SPIN])
    _ready(spinner)
    assert spinner.stdin is not None
    spinner.stdin.write("go\n")
    spinner.stdin.flush()
    return spinner


class _Ended(subprocess.Popen[str]):
    """Ends with its context, however that ends."""

    def __init__(self, words: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
        super().__init__(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __exit__(self, *exception: Any) -> None:
        self.kill()
        super().__exit__(*exception)


def _start(words: Sequence[str]) -> subprocess.Popen[str]:
    return _Ended(words)


def _ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise BenchError("a worker ended before it was ready")


def _result(process: subprocess.Popen[str]) -> Mapping[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError("a worker ended without a result")
    row: Mapping[str, float] = json.loads(line)
    return row
