"""kvmesh beside llama.cpp, vLLM on CPU and transformers: the same jobs, in turns, on this machine.

Each round runs every system once per part, so that a neighbour's noise meets all of them; the table has
medians over the rounds, ratios, and the bars that this project set itself. --log FILE appends every
measurement and reads what is there: rounds may be taken in several sittings; --rounds 0 is the table alone.

  parts     engine-1t, engine-2t   prompt of 512 tokens, 64 tokens generated
            depth-1024, depth-4096 32 tokens generated at a depth, 1 thread
            batch-16               16 sequences together, 1 thread
            steps                  transformers' jobs and the spread of its step times
            server                 streaming completions, --concurrency clients, ~270 + 64 tokens
            worker                 our worker's start and private memory

Peers live in environments of their own: --llama DIR, --vllm DIR (also $KVMESH_PEER_LLAMA, $KVMESH_PEER_VLLM).
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.command import BenchError, Row
from bench.loaded import model_path
from bench.peers.bars import judged
from bench.peers.jobs import PARTS, Job, Setting
from bench.peers.systems import LlamaCpp, Vllm
from bench.peers.tally import Measurement, medians


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=5, help="0: only the table of --log (default 5)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="measurements, kept and added to")
    parser.add_argument(
        "--model", default="pkg:smollm2", metavar="SOURCE", help="a GGUF file (default pkg:smollm2)"
    )
    parser.add_argument("--name", default="smollm2", help="stands before each figure's key (default smollm2)")
    parser.add_argument("--llama", type=Path, default=_directory("KVMESH_PEER_LLAMA"), metavar="DIR")
    parser.add_argument("--vllm", type=Path, default=_directory("KVMESH_PEER_VLLM"), metavar="DIR")
    parser.add_argument(
        "--hf", type=Path, metavar="DIR", help="the model for vLLM and transformers (made if missing)"
    )
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", help="kvmesh, llama.cpp, vllm, transformers")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="SYSTEM=URL[,KEY]",
        help="a server that runs already; its model is called smollm2 (repeatable)",
    )
    parser.add_argument(
        "--up", nargs=argparse.REMAINDER, default=[], help="further words for our 'up' (last)"
    )


def run(arguments: argparse.Namespace) -> Row:
    found = _kept(arguments.log)
    if any("=" not in place for place in arguments.at):
        raise BenchError("--at is SYSTEM=URL or SYSTEM=URL,KEY")
    if arguments.rounds:
        setting = Setting(
            model=Path(model_path(arguments.model)),
            name=arguments.name,
            llama=LlamaCpp.at(arguments.llama),
            vllm=Vllm.at(arguments.vllm, arguments.hf),
            concurrency=arguments.concurrency,
            requests=arguments.requests,
            up=tuple(arguments.up),
            running=dict(place.split("=", 1) for place in arguments.at),
        )
        jobs = [job for part in arguments.parts for job in PARTS[part](setting)]
        if arguments.only:
            jobs = [job for job in jobs if job.system in arguments.only]
        if strange := {job.system for job in jobs} - {"kvmesh", "llama.cpp", "vllm", "transformers"}:
            raise BenchError(f"--at: there is no system {strange.pop()!r}")
        if not jobs:
            raise BenchError(f"nothing to run; {setting.missing()}")
        for line in setting.missing():
            print(line, file=sys.stderr)
        found += _rounds(jobs, arguments.rounds, arguments.log)
    if not found:
        raise BenchError("nothing was measured")
    middle = medians(found)
    return {**middle, **judged(middle)}


def _rounds(jobs: Sequence[Job], rounds: int, log: Path | None) -> list[Measurement]:
    found: list[Measurement] = []
    # So that the servers end with this program, however it is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for _ in range(rounds):
            for job in jobs:
                for key, value in job.run().items():
                    found.append(Measurement(f"{job.system}.{key}", value, time.time()))
                    if log is not None:
                        with log.open("a", encoding="utf-8") as file:
                            file.write(found[-1].line() + "\n")
    finally:
        for job in jobs:
            job.close()
    return found


def _kept(log: Path | None) -> list[Measurement]:
    if log is None or not log.exists():
        return []
    return [Measurement(**json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]


def _directory(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None
