"""Answers through the whole mesh have the status, the headers and the shape of recorded ones of the real service.

`tests/router/test_recordings.py` compares every recording; here they pass Envoy, and real workers.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.harness import Mesh, events
from tests.recordings import RECORDINGS, kinds, recording, shape

pytestmark = pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")

SERVED = [
    "chat-bad-request",
    "chat-basic",
    "chat-streaming",
    "chat-multiturn",
    "chat-unknown-model",
    "chat-detailed-usage",
    "chat-json-mode",
    "chat-reasoning",
    "completion-bad-request",
    "completion-basic",
    "completion-streaming",
    "completion-text-batch",
]

# Recorded headers that an answer has as well.
SAME = {"openai-version", "x-content-type-options", "content-type"}
PRESENT = {"date", "openai-processing-ms", "openai-project", "server", "x-request-id"}
# To pages of other origins only, which may ask from anywhere (test_openai_edge.py).
TO_BROWSERS = {"access-control-allow-origin", "access-control-expose-headers", "vary"}
# Of the length, of limits that there are none of, of transport security where there is no TLS, and of
# machines between OpenAI's servers and its clients.
ABSENT = {"content-length", "strict-transport-security", "alt-svc", "via", "x-openai-proxy-wasm"}
ABSENT |= {"x-envoy-upstream-service-time", "cf-cache-status", "cf-ray", "cache-control", "openai-model"}


@pytest.mark.parametrize("name", SERVED)
async def test_shape(mesh: Mesh, name: str) -> None:
    recorded = recording(name)
    body = dict(recorded.body)
    if name != "chat-unknown-model":
        body["model"] = "script"
    body.pop("reasoning_effort", None)
    if name == "chat-json-mode":
        # The grammar lets a model without sense go on for as long as there is room.
        body["max_completion_tokens"] = 64
    async with mesh.client() as client:
        answer = await client.post(recorded.path, json=body)
    assert answer.status_code == recorded.status, answer.text
    unknown = {name for name in recorded.headers if not name.startswith("x-ratelimit-")}
    assert not unknown - SAME - PRESENT - TO_BROWSERS - ABSENT
    for header in SAME & set(recorded.headers):
        # `charset=utf-8` is there or not: it says the same.
        assert answer.headers[header].split(";")[0] == recorded.headers[header].split(";")[0], header
    for header in PRESENT & set(recorded.headers):
        assert answer.headers[header], header
    if recorded.streamed:
        assert kinds(events(answer.text)) == kinds(events(recorded.text))
        return
    ours = answer.json()
    if recorded.path == "/v1/completions" and answer.status_code == 200:
        # There only when something was cached, which equal beginnings of a batch may bring about.
        ours["usage"].pop("prompt_tokens_details", None)
    assert shape(ours) == shape(json.loads(recorded.text))
