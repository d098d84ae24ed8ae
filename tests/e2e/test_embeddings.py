"""An encoder added to a running mesh, and asked through the edge by the OpenAI client."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from encode.bert import Bert
from tests.e2e.harness import Mesh
from tests.encode.tiny_bert import tiny_bert


async def test_an_encoder_is_added_asked_and_removed(mesh: Mesh, tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "tiny")
    mesh.cli("models", "add", f"vectors={directory}")
    try:
        assert [process["model"] for process in mesh.processes("encode")] == ["vectors"]
        async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=mesh.key, max_retries=5) as client:
            # The client asks for base64 and decodes it.
            answer = await client.embeddings.create(model="vectors", input=["hello", "you"])
            ids = (await _tokenize(mesh, "hello"), await _tokenize(mesh, "you"))
            right = Bert(directory).embed(ids)
            for item, vector in zip(answer.data, right, strict=True):
                assert item.embedding == pytest.approx(vector.tolist(), abs=1e-5)
            assert answer.usage.prompt_tokens == sum(map(len, ids))
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(
                    model="vectors", messages=[{"role": "user", "content": "x"}]
                )
            with pytest.raises(openai.BadRequestError):
                await client.embeddings.create(model="tiny", input="x")
    finally:
        mesh.cli("models", "remove", "vectors")
    assert not mesh.processes("encode")


async def _tokenize(mesh: Mesh, text: str) -> list[int]:
    async with mesh.client() as client:
        answer = await client.post("/tokenize", json={"model": "vectors", "prompt": text})
        ids: list[int] = answer.json()["tokens"]
        return ids
