"""Scored prompts through the edge: what an evaluation harness reads is what the model said when it generated."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Mesh

PROMPT = list(range(3, 60))


async def test_a_prompt_is_as_likely_as_it_was_when_it_was_generated(mesh: Mesh) -> None:
    body = {"model": "tiny", "temperature": 0, "logprobs": 2, "ignore_eos": True}
    async with mesh.grpc() as stub:
        generated, _ = await mesh.generate("tiny", PROMPT, tokens=40, stub=stub)
    async with mesh.client() as client:
        answer = await client.post("/v1/completions", json={**body, "prompt": PROMPT, "max_tokens": 40})
        said = answer.json()["choices"][0]["logprobs"]
        for extra in ({"max_tokens": 0}, {"max_tokens": 1, "n": 3}):
            scored = await client.post(
                "/v1/completions", json={**body, "prompt": [*PROMPT, *generated], "echo": True, **extra}
            )
            assert scored.status_code == 200, scored.text
            # The caches know this prompt by now; a scored one is computed all the same.
            assert "prompt_tokens_details" not in scored.json()["usage"]
            for choice in scored.json()["choices"]:
                again = choice["logprobs"]
                assert again["token_logprobs"][0] is None
                end = len(PROMPT) + 40
                assert again["token_logprobs"][len(PROMPT) : end] == pytest.approx(
                    said["token_logprobs"], abs=1e-5
                )
                assert again["tokens"][len(PROMPT) : end] == said["tokens"]
