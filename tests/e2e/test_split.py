"""Who computes what: prefill every whole block, decode the tail, nobody what is cached."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.e2e.harness import Mesh

P = 16
COMPUTED = {"prefill": "kvmesh_prefill_tokens", "decode": "kvmesh_decode_prompt_tokens"}


def _urls(mesh: Mesh, role: str) -> list[str]:
    """Where the workers of `tiny` show their metrics."""
    if role not in _known:
        _known[role] = [p["metrics_url"] for p in mesh.processes(role) if "tiny" in p["name"]]
    return _known[role]


_known: dict[str, list[str]] = {}


def counter(mesh: Mesh, role: str, name: str) -> float:
    """Sum of a counter over the processes of a role, read from their metrics endpoints."""
    token = (mesh.state / "metrics-token").read_text().strip()
    total = 0.0
    for url in _urls(mesh, role):
        text = httpx.get(url, headers={"authorization": f"Bearer {token}"}).text
        for line in text.splitlines():
            if line.startswith(f"{name}_total "):
                total += float(line.rsplit(" ", 1)[1])
    return total


def computed(mesh: Mesh, role: str) -> float:
    """Prompt tokens that the workers of a role computed."""
    return counter(mesh, role, COMPUTED[role])


async def test_lengths_around_page_borders(mesh: Mesh) -> None:
    draw = random.Random(31)
    async with mesh.grpc() as stub:
        for blocks in (1, 2, 5):
            for length in (blocks * P - 1, blocks * P, blocks * P + 1):
                ids = [draw.randrange(256) for _ in range(length)]
                whole = (length - 1) // P
                prefill, decode = (computed(mesh, r) for r in ("prefill", "decode"))
                runs = counter(mesh, "prefill", "kvmesh_prefill_runs")
                _, usage = await mesh.generate("tiny", ids, stub=stub, tokens=2)
                assert usage.cached_tokens == 0
                assert computed(mesh, "prefill") - prefill == whole * P
                assert computed(mesh, "decode") - decode == length - whole * P
                assert counter(mesh, "prefill", "kvmesh_prefill_runs") - runs == (1 if whole else 0)
                runs = counter(mesh, "prefill", "kvmesh_prefill_runs")
                decode = computed(mesh, "decode")
                _, usage = await mesh.generate("tiny", ids, stub=stub, tokens=2)
                assert usage.cached_tokens == whole * P
                assert counter(mesh, "prefill", "kvmesh_prefill_runs") == runs
                assert computed(mesh, "decode") - decode == length - whole * P


async def test_concurrent_equal_prompts_agree(mesh: Mesh) -> None:
    draw = random.Random(32)
    ids = [draw.randrange(256) for _ in range(20 * P + 3)]
    async with mesh.grpc() as stub:
        answers = await asyncio.gather(*[mesh.generate("tiny", ids, stub=stub, tokens=8) for _ in range(8)])
    assert len({tuple(tokens) for tokens, _ in answers}) == 1


async def test_a_shorter_prompt_after_a_longer_one(mesh: Mesh) -> None:  # B76
    draw = random.Random(33)
    x, y, z, other = ([draw.randrange(256) for _ in range(40)] for _ in range(4))
    async with mesh.grpc() as stub:
        first, _ = await mesh.generate("tiny", x + y + z, stub=stub, tokens=8)
        for ids in (x, x + other, x + y, (x + y + z)[:96], (x + y + z)[:97]):
            cold, usage = await mesh.generate("tiny", ids, stub=stub, tokens=8)
            assert usage.cached_tokens < len(ids)
            again, _ = await mesh.generate("tiny", ids, stub=stub, tokens=8)
            assert again == cold
        last, usage = await mesh.generate("tiny", x + y + z, stub=stub, tokens=8)
        assert last == first
        assert usage.cached_tokens == P * ((120 - 1) // P)


async def test_two_organisations_never_share_a_block(mesh: Mesh) -> None:
    mesh.cli("orgs", "create", "other")
    mesh.cli("grants", "allow", "other", "*")
    secret = mesh.new_key("other")
    text = "the same words for both of them, long enough for several blocks of tokens"
    body = {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}
    async with mesh.client() as mine, mesh.client(key=secret) as theirs:
        for client in (mine, theirs):
            first = (await client.post("/v1/completions", json=body)).json()
            # In the legacy shape the details are there only when something was cached.
            assert "prompt_tokens_details" not in first["usage"]
            second = (await client.post("/v1/completions", json=body)).json()
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == P * ((len(text) - 1) // P)
            assert second["choices"][0]["text"] == first["choices"][0]["text"]


async def test_load_spreads_over_the_workers(mesh: Mesh) -> None:
    draw = random.Random(34)
    async with mesh.grpc() as stub:
        await asyncio.gather(
            *[
                mesh.generate("tiny", [draw.randrange(256) for _ in range(100)], stub=stub, tokens=24)
                for _ in range(32)
            ]
        )
    token = (mesh.state / "metrics-token").read_text().strip()
    for role in ("prefill", "decode"):
        for process in mesh.processes(role):
            if "tiny" in process["name"]:
                text = httpx.get(process["metrics_url"], headers={"authorization": f"Bearer {token}"}).text
                line = next(li for li in text.splitlines() if li.startswith(f"{COMPUTED[role]}_total "))
                assert float(line.rsplit(" ", 1)[1]) > 0, process["name"]
