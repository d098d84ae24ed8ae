"""Slow is not broken: nothing on the way bounds a whole answer, and nothing asks twice."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.harness import Mesh
from tests.e2e.test_openai_edge import chat, joined, plain, streamed


def finished(mesh: Mesh) -> float:
    """Requests that the routers have answered well."""
    token = (mesh.state / "metrics-token").read_text().strip()
    total = 0.0
    for process in mesh.processes("router"):
        text = httpx.get(process["metrics_url"], headers={"authorization": f"Bearer {token}"}).text
        for line in text.splitlines():
            if line.startswith("kvmesh_requests_total{") and 'outcome="ok"' in line:
                total += float(line.rsplit(" ", 1)[1])
    return total


async def test_a_slow_stream_is_never_cut_by_a_total_timeout(mesh: Mesh) -> None:  # B114
    text = "abcdefghij" * 2
    before = finished(mesh)
    async with mesh.client() as client:
        chunks, _ = await streamed(client, chat(text, metadata={"script_delay_ms": "1000"}))
        assert joined(chunks) == text
    assert finished(mesh) == before + 1


@pytest.mark.slow
async def test_ninety_slow_seconds(mesh: Mesh) -> None:  # B114
    body = chat("x" * 45, metadata={"script_delay_ms": "2000"})
    before = finished(mesh)
    async with mesh.client(timeout_s=300) as client:
        whole, (chunks, _) = await asyncio.gather(plain(client, body), streamed(client, body))
        assert whole["choices"][0]["message"]["content"] == joined(chunks) == "x" * 45
    assert finished(mesh) == before + 2


@pytest.mark.slow
async def test_a_first_token_after_half_a_minute(mesh: Mesh) -> None:  # B114
    body = chat("ab", metadata={"script_delay_ms": "27000"}, max_tokens=1)
    before = finished(mesh)
    async with mesh.client(timeout_s=300) as client:
        whole, (chunks, _) = await asyncio.gather(plain(client, body), streamed(client, body))
        assert whole["choices"][0]["message"]["content"] == joined(chunks) == "a"
    assert finished(mesh) == before + 2
