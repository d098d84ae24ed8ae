"""pydantic-ai: a plain and a streamed run, and an answer of a type, which its tool's schema forces."""

from __future__ import annotations

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    population: int
    coastal: bool


async def main() -> None:
    provider = OpenAIProvider(base_url=os.environ["KVMESH_URL"] + "/v1", api_key=os.environ["KVMESH_KEY"])
    said = await Agent(OpenAIChatModel("script", provider=provider)).run("hello there")
    assert said.output == "hello there", said.output
    assert said.usage.output_tokens > 0
    async with Agent(OpenAIChatModel("script", provider=provider)).run_stream("one two") as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == "one two"
    settings = {"max_tokens": 400, "temperature": 0.0}
    # A model with random weights: only the grammar makes it say what fits.
    tiny = OpenAIChatModel("tiny", provider=provider)
    for kind in (City, NativeOutput(City)):
        typed = await Agent(tiny, output_type=kind, model_settings=settings).run("Name a city.")
        assert isinstance(typed.output, City), typed.output


asyncio.run(main())
