"""Answers have the shape of recorded answers of the real service: fields, null or absent, order, headers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.harness import ROOT, Mesh, events

CASES = Path(os.environ.get("KVMESH_CASES", ROOT.parent / "shared" / "cases")) / "openai-recordings"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no recordings at {CASES}")

SERVED = [
    "chat-basic",
    "chat-streaming",
    "chat-multiturn",
    "chat-unknown-model",
    "chat-detailed-usage",
    "chat-json-mode",
    "chat-reasoning",
    "completion-basic",
    "completion-streaming",
    "completion-text-batch",
]


def recording(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    interaction = yaml.safe_load((CASES / f"{name}.yaml").read_text())["interactions"][0]
    return interaction["request"], interaction["response"]


def shape(value: Any) -> Any:
    """Keys and kinds, not values; numbers are one kind."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in ("obfuscation",)}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    if value is None or isinstance(value, (bool, str)):
        return type(value).__name__
    return "number"


@pytest.mark.parametrize("name", SERVED)
async def test_shape(mesh: Mesh, name: str) -> None:
    request, response = recording(name)
    body = json.loads(request["body"])
    if name != "chat-unknown-model":
        body["model"] = "script"
    body.pop("reasoning_effort", None)
    # Under a grammar a scripted model writes on to the end of its context.
    body.setdefault("max_completion_tokens" if "messages" in body else "max_tokens", 400)
    path = request["url"].removeprefix("https://api.openai.com")
    async with mesh.client() as client:
        answer = await client.post(path, json=body)
    status = int(str(response["status"]).split()[0]) if "status" in response else response["code"]
    assert answer.status_code == status, answer.text
    assert (
        answer.headers["content-type"].split(";")[0] == response["headers"]["Content-Type"][0].split(";")[0]
    )
    assert answer.headers["x-request-id"]
    if answer.status_code == 200:
        assert answer.headers["openai-version"] == response["headers"]["Openai-Version"][0]
        assert answer.headers["openai-processing-ms"].isdigit()
    if body.get("stream"):
        theirs, ours = events(response["body"]), events(answer.text)
        assert ours[-1] == theirs[-1] == "[DONE]"
        assert shape(ours[0]) == shape(theirs[0])
        assert shape(ours[1]) == shape(theirs[1])
        assert shape(
            [c for c in ours if c != "[DONE]" and c["choices"] and c["choices"][0]["finish_reason"]]
        ) == shape([c for c in theirs if c != "[DONE]" and c["choices"] and c["choices"][0]["finish_reason"]])
        assert bool(ours[-2]["choices"]) == bool(theirs[-2]["choices"])
    else:
        ours = answer.json()
        if path == "/v1/completions":
            # There only when something was cached, which equal beginnings of a batch may bring about.
            ours["usage"].pop("prompt_tokens_details", None)
        assert shape(ours) == shape(json.loads(response["body"]))
