"""What everything but the engine costs: a whole mesh with workers whose model says what it is told.

Envoy, IAM, NATS, the store, router, prefill and decode run as always, with everything on; the scripted model
takes no time to speak of. Prompts have about 550 tokens of a real tokenizer and begin differently, so that
no cache helps; an answer has one token. The load is a process of its own that parses nothing.

  c128_req_s            requests a second of 128 clients in a closed loop
  c1_p50_ms, c1_p99_ms  one client alone, from sending to the whole answer
  ROLE_cpu_ms           CPU time of a request of the 128 clients in a role's processes; `load`: the load's own
  phase_NAME_p50_ms     of one client's requests, as the router's spans have them; they add up to its time

--dynamo DIR measures Dynamo beside us, in turns: its frontend with the KV router, two prefill and two decode
mockers of unlimited speed (also $KVMESH_PEER_DYNAMO). --text is then a Hugging Face directory.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from bench.command import BenchError, Row
from bench.dynamo import running_dynamo
from bench.http_load import Job, Result
from bench.load_process import run_load
from bench.loaded import model_path
from bench.mesh import RunningMesh, cpu_s_by_role, running_mesh
from bench.serve import WORDS, percentile

PATH = "/v1/chat/completions"
MODEL = "scripted"
PHASES = ("authorise", "tokenise", "queue", "place", "prefill", "handover", "first_step", "decode")
_ROLES = ("router", "envoy", "iam", "kvstore", "prefill", "decode", "nats")
"""Of the bodies, so many that a run does not come to their end."""
_BODIES = 6000

Figures = Mapping[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=128, help="of the closed loop (default 128)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement (default 8)")
    parser.add_argument("--rounds", type=int, default=1, help="the table has medians (default 1)")
    parser.add_argument("--words", type=int, default=520, help="words of a prompt (default 520: ~550 tokens)")
    parser.add_argument("--router", type=int, default=1, help="router processes (default 1)")
    parser.add_argument(
        "--text",
        default="pkg:smollm2",
        metavar="SOURCE",
        help="whose tokenizer and template, or bytes (default pkg:smollm2)",
    )
    peer = os.environ.get("KVMESH_PEER_DYNAMO")
    parser.add_argument("--dynamo", type=Path, default=peer and Path(peer), metavar="DIR")


def run(arguments: argparse.Namespace) -> Row:
    if (
        min(arguments.clients, arguments.rounds, arguments.words, arguments.router) < 1
        or arguments.seconds <= 0
    ):
        raise BenchError("--clients, --seconds, --rounds, --words and --router: above 0")
    found: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        measures = [_ours(stack, arguments)]
        if arguments.dynamo is not None:
            measures.append(_dynamo(stack, arguments))
        for number in range(arguments.rounds):
            for measure in measures:
                for key, value in measure(number).items():
                    found[key].append(value)
    row = {key: statistics.median(values) for key, values in found.items()}
    crowd = f"c{arguments.clients}_req_s"
    if f"dynamo_{crowd}" in row:
        row[f"{crowd}_to_dynamo"] = row[crowd] / row[f"dynamo_{crowd}"]
    return {"rounds": arguments.rounds, **row}


def _ours(stack: ExitStack, arguments: argparse.Namespace) -> Callable[[int], Figures]:
    text = "" if arguments.text == "bytes" else f"text={model_path(arguments.text)},"
    source = f"script:{text}check=tail"
    mesh = stack.enter_context(
        running_mesh(["--model", f"{MODEL}={source}", "--router", str(arguments.router), "--kv-memory", "1G"])
    )
    _load(mesh.port, mesh.key, arguments, "warm", clients=8, seconds=1.0)
    pids = mesh.pids()

    def measure(number: int) -> Figures:
        figures = _crowd(mesh.port, mesh.key, pids, arguments, number)
        since_ns = time.time_ns()
        figures |= _alone(mesh.port, mesh.key, arguments, number)
        return {**figures, **_phases(mesh, since_ns)}

    return measure


def _dynamo(stack: ExitStack, arguments: argparse.Namespace) -> Callable[[int], Figures]:
    peer = stack.enter_context(running_dynamo(arguments.dynamo, Path(arguments.text), MODEL))
    _load(peer.port, "", arguments, "warm", clients=8, seconds=1.0)

    def measure(number: int) -> Figures:
        figures = _crowd(peer.port, "", peer.pids, arguments, number) | _alone(
            peer.port, "", arguments, number
        )
        return {
            key if key.startswith("dynamo_") else f"dynamo_{key}": value for key, value in figures.items()
        }

    return measure


def _crowd(
    port: int, key: str, pids: Mapping[int, str], arguments: argparse.Namespace, number: int
) -> dict[str, float]:
    before = cpu_s_by_role(pids)
    crowd = _load(port, key, arguments, f"crowd {number}", clients=arguments.clients)
    spent = cpu_s_by_role(pids)
    requests = len(crowd.latencies_ms)
    roles = [role for role in _ROLES if role in spent] + sorted(set(spent) - set(_ROLES))
    return {
        f"c{arguments.clients}_req_s": requests / crowd.wall_s,
        f"c{arguments.clients}_p50_ms": percentile(crowd.latencies_ms, 50),
        f"c{arguments.clients}_p99_ms": percentile(crowd.latencies_ms, 99),
        **{f"{role}_cpu_ms": (spent[role] - before.get(role, 0.0)) / requests * 1e3 for role in roles},
        "load_cpu_ms": crowd.cpu_s / requests * 1e3,
    }


def _alone(port: int, key: str, arguments: argparse.Namespace, number: int) -> dict[str, float]:
    alone = _load(port, key, arguments, f"alone {number}", clients=1, seconds=arguments.seconds / 2)
    return {f"c1_p{p}_ms": percentile(alone.latencies_ms, p) for p in (50, 99)}


def _load(
    port: int,
    key: str,
    arguments: argparse.Namespace,
    name: str,
    *,
    clients: int,
    seconds: float | None = None,
) -> Result:
    """Raises BenchError where an answer is no answer."""
    seconds = arguments.seconds if seconds is None else seconds
    count = min(_BODIES, max(clients, int(seconds * 2000)))
    job = Job(
        port=port,
        path=PATH,
        clients=clients,
        bodies=[_body(f"{name} {number}", arguments.words) for number in range(count)],
        key=key,
        seconds=seconds,
        requests=count,
    )
    result = Result(**run_load("bench.http_load", job))
    if result.failed:
        raise BenchError(f"{result.failed} of the answers are errors, such as {result.first_error}")
    return result


def _body(name: str, words: int) -> str:
    draw = random.Random(name)  # noqa: S311 — repeatable on purpose
    content = " ".join([str(draw.random()), *draw.choices(WORDS, k=words)])
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1})


def _phases(mesh: RunningMesh, since_ns: int) -> dict[str, float]:
    """Medians over the requests that began since then."""
    taken: dict[str, list[float]] = defaultdict(list)
    for path in (mesh.state / "traces").glob("router*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                span = json.loads(line)
            except ValueError:
                continue  # half a line, which is being written
            if span["name"] in PHASES and span["start_ns"] >= since_ns:
                taken[span["name"]].append((span["end_ns"] - span["start_ns"]) / 1e6)
    return {f"phase_{name}_p50_ms": percentile(taken[name], 50) for name in PHASES if name in taken}
