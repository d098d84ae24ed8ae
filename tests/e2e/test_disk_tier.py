"""Prompts that memory has no room for any more, served from disk: the same tokens, and counted as cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.harness import running

P = 16
PROMPTS = 12
TOKENS = 200


@pytest.mark.parametrize("nodes", [(), ("--node", "a=prefill", "--node", "b=decode")], ids=["one", "two"])
async def test_evicted_prompts_come_back_from_disk(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    """64 pages hold four of the twelve prompts."""
    args = [*nodes, "--model", "tiny=tiny:seed=1", "--page-pool", "64", "--kv-disk", "16M"]
    draw = random.Random(11)
    prompts = [[draw.randrange(256) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    with running(tmp_path / "state", args) as mesh:
        async with mesh.grpc() as stub:
            first = [await mesh.generate("tiny", p, tokens=20, stub=stub) for p in prompts]
            again = [await mesh.generate("tiny", p, tokens=20, stub=stub) for p in prompts]
        assert all(usage.cached_tokens == 0 for _, usage in first)
        assert [ids for ids, _ in again] == [ids for ids, _ in first]
        assert [usage.cached_tokens for _, usage in again] == [P * ((TOKENS - 1) // P)] * PROMPTS
        stores = mesh.processes("kvstore")
        assert all(store["disk"]["failing"] == 0 for store in stores)
        assert sum(store["disk"]["used"] for store in stores) > 0
        assert "on disk" in mesh.cli("status")

        said = mesh.cli("orgs", "forget", "dev")
        assert "kvstore-0" in said
        assert not [p for p in mesh.state.rglob("*.page") if "kv-disk" in str(p)]
        async with mesh.grpc() as stub:
            ids, usage = await mesh.generate("tiny", prompts[0], tokens=20, stub=stub)
        assert ids == first[0][0]
        assert usage.cached_tokens == 0
