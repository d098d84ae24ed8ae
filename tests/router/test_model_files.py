"""Models as files bring them: templates that refuse, begin tokens or none, and what becomes of empty prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.router.world import World, world
from tests.text import gguf_builder as build
from tests.text.small_bpe import BOS, metadata
from tests.text.test_model import ORDERS, STRICT, WITH_BOS

Serve = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def running(template: str | None = None, **changes: Any) -> AsyncIterator[World]:
        keys = metadata(**changes)
        if template is not None:
            keys["tokenizer.chat_template"] = template
        path = tmp_path / "small.gguf"
        path.write_bytes(build.metadata_file(keys))
        async with world(prefill=0, source=str(path)) as mesh:
            yield mesh

    return running


async def test_what_the_template_refuses_is_a_400_with_its_own_words(serve: Serve) -> None:  # B31
    async with serve(STRICT) as mesh:
        for roles, reason in ORDERS:
            messages = [{"role": role, "content": "x"} for role in roles]
            for stream in (False, True):
                answer = await mesh.chat(messages=messages, stream=stream, max_tokens=1)
                if reason is None:
                    assert answer.status_code == 200, (roles, answer.text)
                    continue
                assert answer.status_code == 400, (roles, answer.text)
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"].startswith("messages")
                # An unknown role is refused before the template is asked.
                assert reason in error["message"] or "wizard" in roles


async def test_a_model_without_a_template_says_so(serve: Serve) -> None:  # B31
    async with serve() as mesh:
        answer = await mesh.chat()
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert (await mesh.complete("a", max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"add_bos_token": True}, 2),
        ({"add_bos_token": False}, 1),
        ({}, 1),
        ({"pre": "llama-bpe"}, 2),
        ({"add_eos_token": True}, 2),
    ],
)
async def test_begin_tokens_are_counted_as_the_file_says(
    serve: Serve, changes: dict[str, Any], tokens: int
) -> None:  # B80
    async with serve(**changes) as mesh:
        answer = await mesh.complete("a", max_tokens=1)
        assert answer.json()["usage"]["prompt_tokens"] == tokens


async def test_the_same_conversation_costs_the_same_by_either_way(serve: Serve) -> None:  # B35
    async with serve(WITH_BOS, add_bos_token=True) as mesh:
        chat = await mesh.chat("abc", max_tokens=1)
        raw = await mesh.complete("<|bos|>user:abc\n", max_tokens=1)
        assert chat.json()["usage"]["prompt_tokens"] == raw.json()["usage"]["prompt_tokens"]
        for opened in mesh.worker.opened:
            ids = list(opened.prompt.segments[0].tokens.ids)
            assert ids.count(BOS) == 1
            assert ids[0] == BOS


@pytest.mark.parametrize("begins", [True, False])
async def test_an_empty_prompt_is_an_answer_or_a_400(serve: Serve, begins: bool) -> None:  # B23
    async with serve(WITH_BOS, add_bos_token=begins) as mesh:
        prompts: list[Any] = ["", [""], [], [[]], None, " "]
        for prompt in prompts:
            for stream in (False, True):
                answer = await mesh.complete(prompt, stream=stream, max_tokens=1)
                allowed = {200} if prompt == " " else {200, 400} if begins else {400}
                assert answer.status_code in allowed, (prompt, stream, answer.text)
        for messages in ([], [{"role": "user", "content": ""}], [{"role": "user", "content": []}]):
            for stream in (False, True):
                answer = await mesh.chat(messages=messages, stream=stream, max_tokens=1)
                assert answer.status_code in (200, 400), (messages, answer.text)
        assert (await mesh.complete("a", max_tokens=1)).status_code == 200
