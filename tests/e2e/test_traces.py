"""One trace tells where the time went: its phases sum to the client's time to first token."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.e2e.harness import Mesh

BEFORE_FIRST_TOKEN = ("authorise", "tokenise", "queue", "place", "prefill", "handover", "first_step")


@pytest.mark.model
async def test_phases_sum_to_the_time_to_first_token(smollm2: Mesh) -> None:
    text = "Explain in detail how a mesh of workers serves a language model. " * 12
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "stream": True,
        "temperature": 0,
    }
    async with smollm2.client() as client:
        await client.get("/v1/models")
        started = time.time()
        first = None
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            request_id = answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: ") and '"content":' in line:
                    data = json.loads(line[6:])
                    if data["choices"][0]["delta"].get("content"):
                        first = time.time() - started
    assert first is not None
    # Envoy sends its spans in batches, some seconds apart.
    async with asyncio.timeout(30):
        while True:
            said = await asyncio.to_thread(smollm2.cli, "trace", request_id, "--json")
            lines = [json.loads(line) for line in said.splitlines()]
            services = {s["service"].split("-")[0] for s in lines}
            if "envoy" in services:
                break
            await asyncio.sleep(0.5)
    spans = {s["name"]: s for s in lines if s["service"].startswith("router")}
    phases = {name: (spans[name]["end_ns"] - spans[name]["start_ns"]) / 1e9 for name in BEFORE_FIRST_TOKEN}
    assert abs(sum(phases.values()) - first) <= 0.05 * first + 0.01, phases
    assert "decode" in spans
    assert {"router", "prefill", "decode", "envoy"} <= services
