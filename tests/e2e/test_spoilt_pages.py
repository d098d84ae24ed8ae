"""A thousand pages that are damaged, cut, exchanged, old, lost or doubled between two nodes: no wrong answer.

Every fault is put by the sending store into pages of live requests; whatever arrives is either what
was committed or computed anew, and a request that cannot be served says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.faults import fired_file, rules_file
from mesh.supervisor.state import existing_state
from tests.e2e.harness import Mesh, running

NODES = ["--node", "a=prefill", "--node", "b=decode", "--kv-memory", "64M", "--model", "tiny=tiny:seed=1"]
SPOILT = ("corrupt", "truncate", "foreign", "stale", "drop", "duplicate")
NEW = 12


def arm(mesh: Mesh, name: str, rules: list[dict[str, Any]]) -> None:
    run = existing_state(mesh.state).run
    rules_file(run, name).write_text(json.dumps(rules))
    os.kill(mesh.pids()[name], signal.SIGUSR2)


def fired(mesh: Mesh, name: str) -> Counter[str]:
    try:
        lines = fired_file(existing_state(mesh.state).run, name).read_text().splitlines()
    except FileNotFoundError:
        return Counter()
    return Counter(line.split()[2] for line in lines)


@pytest.mark.parametrize("listen", ["unix", "tcp"])
async def test_no_answer_is_built_on_a_spoilt_page(tmp_path: Path, listen: str) -> None:
    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    executor = engine.load("tiny:seed=1", threads=1)
    draw = random.Random(29)
    wanted = 600
    with running(tmp_path / "state", [*NODES, "--listen", listen, "--fault-points"]) as mesh:
        # How often decides who mends it: once in a while the transfer itself, often the next attempt.
        rare, often = ([(a, every + k) for k, a in enumerate(SPOILT)] for every in (40, 7))
        answered = refused = 0
        async with mesh.grpc() as stub:
            for share in (rare, often):
                arm(
                    mesh,
                    "kvstore-0",
                    [
                        {"point": "page_sent", "action": a, "nth": 2 + k, "every": every, "times": 10**6}
                        for k, (a, every) in enumerate(share)
                    ],
                )
                arm(
                    mesh,
                    "kvstore-1",
                    [
                        {"point": "page_leased", "action": "duplicate", "nth": 2, "every": 3, "times": 10**6},
                        {
                            "point": "page_leased",
                            "action": "delay",
                            "seconds": 0.02,
                            "nth": 3,
                            "every": 7,
                            "times": 10**6,
                        },
                    ],
                )
                target = sum(fired(mesh, "kvstore-0").values()) + wanted * (1 if share is often else 0.15)
                while sum(fired(mesh, "kvstore-0").values()) < target:
                    prompts = [
                        [draw.randrange(256) for _ in range(draw.randrange(40, 500))] for _ in range(6)
                    ]
                    calls = [mesh.generate("tiny", p, tokens=NEW, stub=stub) for p in prompts]
                    for prompt, answer in zip(
                        prompts, await asyncio.gather(*calls, return_exceptions=True), strict=True
                    ):
                        if isinstance(answer, BaseException):
                            assert isinstance(answer, grpc.aio.AioRpcError), answer
                            assert answer.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
                            refused += 1
                            continue
                        answered += 1
                        assert answer[0] == generate(executor, prompt, SamplingParams(temperature=0), NEW)
        seen = fired(mesh, "kvstore-0")
        print(f"{listen}: {dict(seen)}, news {dict(fired(mesh, 'kvstore-1'))}, {answered=} {refused=}")
        assert set(seen) == set(SPOILT)
        assert min(seen.values()) > 40, seen
        assert set(fired(mesh, "kvstore-1")) == {"duplicate", "delay"}
        assert answered > 50
        assert refused <= answered // 50
        for _ in range(100):
            if not mesh.leased() and not mesh.busy():
                break
            await asyncio.sleep(0.05)
        assert mesh.leased() == 0
        assert not any(p["invariant_violations"] for p in mesh.processes("kvstore"))
