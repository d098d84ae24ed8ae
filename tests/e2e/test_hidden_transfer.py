"""Between two nodes with a link of 200 MB/s, pages travel while prefill computes: little of it is waited for.

The mesh runs in a network namespace of its own whose loopback lets 200 MB/s through.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Mesh, running

LINK_BYTES_S = 200e6
REQUESTS = 5

ASK = """
import json, sys, urllib.request
url, key, words = sys.argv[1:]
body = {"model": "smollm2", "prompt": words, "max_tokens": 2, "temperature": 0}
head = {"authorization": "Bearer " + key, "content-type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), head)) as r:
    print(json.dumps({"id": r.headers["x-request-id"], "usage": json.load(r)["usage"]}))
"""


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Mesh]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, ip and tc")
    name = f"kvmesh-test-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        limit = f"tc qdisc add dev lo root tbf rate {int(LINK_BYTES_S * 8)}bit burst 512kb latency 100ms"
        if subprocess.run([*inside, *limit.split()], check=False, capture_output=True).returncode:
            pytest.skip("tc tbf is not permitted here")
        args = ["--listen", "tcp", "--node", "a=prefill", "--node", "b=decode", "--executor", "cpu"]
        with running(tmp_path / "state", [*args, "--kv-memory", "1G"], prefix=inside) as m:
            yield m
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
@pytest.mark.model
def test_at_most_a_fifth_of_the_transfer_is_waited_for(limited: Mesh) -> None:
    draw = random.Random(3)
    shares: list[float] = []
    words = [
        "pages",
        "travel",
        "between",
        "nodes",
        "while",
        "the",
        "prompt",
        "is",
        "still",
        "being",
        "computed",
        "by",
        "another",
        "worker",
    ]
    for _ in range(REQUESTS):
        text = " ".join(draw.choice(words) for _ in range(1150))
        before = _pulled(limited)
        command = [*limited.prefix, sys.executable, "-c", ASK, limited.url, limited.key, text]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert answer["usage"]["prompt_tokens"] >= 1000
        moved = _pulled(limited) - before
        assert moved * 16 >= 1000 - 16
        lines = [json.loads(line) for line in limited.cli("trace", answer["id"], "--json").splitlines()]
        spans = {s["name"]: s for s in lines if s["service"].startswith("router")}
        exposed_s = (spans["handover"]["end_ns"] - spans["handover"]["start_ns"]) / 1e9
        transfer_s = moved * _page_bytes(limited) / LINK_BYTES_S
        shares.append(exposed_s / transfer_s)
        print(f"{moved} pages, transfer {transfer_s * 1e3:.0f} ms, exposed {exposed_s * 1e3:.1f} ms")
    assert statistics.median(shares) <= 0.2, shares


def _store(mesh: Mesh) -> dict[str, Any]:
    [store] = [p for p in mesh.processes("kvstore") if p["name"] == "kvstore-1"]
    return store


def _pulled(mesh: Mesh) -> int:
    return int(_store(mesh)["pulled_blocks"])


def _page_bytes(mesh: Mesh) -> int:
    """From the arena's own file: all pages are of one size."""
    [pages] = [p for p in Path("/dev/shm").glob("kvmesh-*.pages") if _is_of(p, mesh)]
    return pages.stat().st_size // int(_store(mesh)["pages"]["total"])


def _is_of(path: Path, mesh: Mesh) -> bool:
    from mesh.supervisor.sweep import arena_prefix

    return path.name.startswith(arena_prefix(mesh.state / "nodes" / "b"))
