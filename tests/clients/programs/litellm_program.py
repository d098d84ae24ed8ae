"""litellm as an SDK: chat, a stream with usage, embeddings, responses, and an error of the right class."""

from __future__ import annotations

import os

# Its prices are a file of its own, not one to be fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

litellm.telemetry = False
there = {"api_base": os.environ["KVMESH_URL"] + "/v1", "api_key": os.environ["KVMESH_KEY"]}
ask = [{"role": "user", "content": "hello there"}]
said = litellm.completion(model="openai/script", messages=ask, **there)
assert said.choices[0].message.content == "hello there"
assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
chunks = list(
    litellm.completion(
        model="openai/script", messages=ask, stream=True, stream_options={"include_usage": True}, **there
    )
)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
assert chunks[-1].usage.completion_tokens == said.usage.completion_tokens
tool = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
called = litellm.completion(
    model="openai/tiny", messages=ask, tools=[tool], tool_choice="required", max_tokens=300, **there
)
assert called.choices[0].finish_reason in ("tool_calls", "length")
vector = litellm.embedding(model="openai/vectors", input=["hello"], **there)
assert len(vector.data[0]["embedding"]) > 1
response = litellm.responses(model="openai/script", input="hello there", **there)
assert response.output[0].content[0].text == "hello there"
try:
    litellm.completion(model="openai/nowhere", messages=ask, **there)
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was served")
