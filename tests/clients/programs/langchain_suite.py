"""The standard integration tests of LangChain for `langchain-openai`: run by pytest in the client's environment.

SmolLM2 with 135M parameters calls tools because a grammar lets it say nothing else.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

THERE = {"base_url": os.environ["KVMESH_URL"] + "/v1", "api_key": os.environ["KVMESH_KEY"]}


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2", "temperature": 0, "max_tokens": 400, "stream_usage": True, **THERE}

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # Without it the client asks a tokenizer of OpenAI's models for ids, which it would have to download.
        return {"model": "vectors", "check_embedding_ctx_length": False, **THERE}
