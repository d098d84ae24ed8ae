"""The other dialects through the real edge: responses that are kept for whichever router, and messages."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

from tests.e2e.harness import Mesh


async def test_responses_with_the_openai_client_on_any_router(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=mesh.key) as client:
        first = await client.responses.create(model="script", input="my name is Ada")
        assert first.status == "completed"
        assert first.output_text == "my name is Ada"
        # Two routers take turns: what one keeps, both know.
        for _ in range(6):
            kept = await client.responses.retrieve(first.id)
            assert kept.output_text == first.output_text
        items = [item async for item in client.responses.input_items.list(first.id)]
        assert len(items) == 1
        texts: list[str] = []
        async with client.responses.stream(
            model="script", input="and now?", previous_response_id=first.id
        ) as stream:
            texts += [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(texts) == final.output_text == "and now?"
        assert final.usage is not None
        assert final.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]
        await client.responses.delete(first.id)
        try:
            await client.responses.retrieve(first.id)
            raise AssertionError("a deleted response was found")
        except openai.NotFoundError:
            pass
    async with mesh.client(key=mesh.new_key("dev")) as other:
        assert (await other.get(f"/v1/responses/{final.id}")).status_code == 200
    mesh.cli("orgs", "create", "stranger")
    mesh.cli("grants", "allow", "stranger", "*")
    async with mesh.client(key=mesh.new_key("stranger")) as other:
        assert (await other.get(f"/v1/responses/{final.id}")).status_code == 404


async def test_kept_responses_survive_their_service(mesh: Mesh) -> None:
    async with mesh.client() as client:
        said = (await client.post("/v1/responses", json={"model": "script", "input": "stay"})).json()
        mesh.cli("restart", "responses")
        kept = await client.get(f"/v1/responses/{said['id']}")
        assert kept.status_code == 200, kept.text
        assert kept.json() == said


async def test_messages_with_the_key_in_its_own_header(mesh: Mesh) -> None:
    body: dict[str, Any] = {
        "model": "script",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "hello"}],
    }
    headers = {"x-api-key": mesh.key, "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(base_url=mesh.url, headers=headers, timeout=60) as client:
        said = (await client.post("/v1/messages", json=body)).json()
        assert said["content"] == [{"type": "text", "text": "hello"}]
        streamed = (await client.post("/v1/messages", json={**body, "stream": True})).text
        assert streamed.startswith("event: message_start\n")
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        usage = said["usage"]
        assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        refused = await client.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
        assert refused.status_code == 401
        assert json.loads(refused.text)["error"]["type"] == "authentication_error"
