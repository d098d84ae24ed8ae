"""What the real service was recorded to answer is answered with the same fields, nulls, kinds and order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.encode.tiny_bert import tiny_bert
from tests.recordings import RECORDINGS, Recording, kinds, recording, shape
from tests.router.fakes import Script, text_script
from tests.router.world import World, events, world

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}"),
]
GENERATED = [
    "chat-basic",
    "chat-detailed-usage",
    "chat-json-mode",
    "chat-multiturn",
    "chat-parallel-tools",
    "chat-reasoning",
    "chat-streaming",
    "completion-basic",
    "completion-streaming",
    "completion-text-batch",
    "completion-token",
]
REFUSED = ["chat-bad-request", "chat-unknown-model", "completion-bad-request"]
EMBEDDED = ["embeddings-basic", "embeddings-base64", "embeddings-bad-request"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[World]:
    async with world() as made:
        yield made


async def test_every_recording_is_compared() -> None:
    assert sorted(path.stem for path in RECORDINGS.glob("*.yaml")) == sorted(GENERATED + REFUSED + EMBEDDED)


def said(recorded: Recording) -> Script:
    """A worker that says what was recorded."""
    if recorded.streamed:
        chunks = [chunk["choices"][0] for chunk in events(recorded.text) if chunk != "[DONE]"]
        return text_script("".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in chunks))
    choice = json.loads(recorded.text)["choices"][0]
    message = choice.get("message", {})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        return text_script(f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}')
    return text_script(choice.get("text") or message["content"] or "x" * 200)


@pytest.mark.parametrize("name", GENERATED)
async def test_what_is_generated(mesh: World, name: str) -> None:
    recorded = recording(name)
    body = {**recorded.body, "model": "tiny"}
    body.pop("reasoning_effort", None)
    if name == "completion-token":
        # Ids of another vocabulary.
        body["prompt"] = [token % 256 for token in body["prompt"]]
    mesh.worker.behaviour.script = said(recorded)
    answer = await mesh.post(recorded.path, body)
    assert answer.status_code == recorded.status, answer.text
    if recorded.streamed:
        assert kinds(events(answer.text)) == kinds(events(recorded.text))
        return
    ours, theirs = answer.json(), json.loads(recorded.text)
    if recorded.path == "/v1/completions":
        # Where a client sees cached tokens, if there are any; the recorded models are older than the field.
        ours["usage"].pop("prompt_tokens_details", None)
    assert [shape(choice) for choice in ours["choices"]] == [shape(choice) for choice in theirs["choices"]]
    assert [choice["index"] for choice in ours["choices"]] == [c["index"] for c in theirs["choices"]]
    assert shape(ours) == shape(theirs)
    if name != "chat-detailed-usage":
        # That one was cut off while it thought.
        assert ours["choices"][0]["finish_reason"] in (theirs["choices"][0]["finish_reason"], "length")


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(mesh: World, name: str) -> None:
    recorded = recording(name)
    body = recorded.body if name == "chat-unknown-model" else {**recorded.body, "model": "tiny"}
    answer = await mesh.post(recorded.path, body)
    assert answer.status_code == recorded.status
    ours, theirs = answer.json(), json.loads(recorded.text)
    assert shape(ours) == shape(theirs)
    assert ours["error"]["type"] == theirs["error"]["type"]
    if name != "chat-bad-request":
        # There the recorded model does not know `max_tokens` at all; here it may not be 0.
        assert ours["error"] == theirs["error"]


@pytest.mark.parametrize("name", EMBEDDED)
async def test_what_is_embedded(tmp_path: Path, name: str) -> None:
    recorded = recording(name)
    directory = tiny_bert(tmp_path / "tiny")
    async with world(prefill=0, decode=0, source=str(directory), encode=directory) as mesh:
        body: dict[str, Any] = {**recorded.body, "model": "tiny"}
        answer = await mesh.post(recorded.path, body)
        assert answer.status_code == recorded.status, answer.text
        ours, theirs = answer.json(), json.loads(recorded.text)
        if recorded.status != 200:
            # The real service names neither the parameter nor a code here; every refusal of ours does.
            assert theirs["error"]["param"] is None
            assert ours["error"]["param"] == "encoding_format"
            ours["error"] |= {"param": None, "code": None}
        assert shape(ours) == shape(theirs)
