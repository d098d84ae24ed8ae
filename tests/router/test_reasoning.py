"""What a model thinks before it speaks: split off in both modes, counted, switched by its template."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.config import ConfigError
from mesh.errors import InvalidRequest
from router.openai.reasoning import variables
from router.parsers import parsers_of
from tests.router.fakes import text_script
from tests.router.world import World, events, world
from text import load_text_model
from text.chat_template import JinjaChatTemplate

SCRIPT = load_text_model("script:")


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(reasoning_parser="think", tool_parser="other=mistral,hermes") as made:
        yield made


def thought_of(chunks: list[Any], name: str) -> str:
    return "".join(c["choices"][0]["delta"].get(name) or "" for c in chunks if c != "[DONE]" and c["choices"])


ANSWERS = [
    ("<think>\nTwo and two.\n</think>\n\nFour: ž.", "Two and two.", "Four: ž.", "stop", 23),
    ("Four.", "", "Four.", "stop", 0),
    ("<think>no end", "no end", "", "stop", 8),
]


@pytest.mark.parametrize(("answer", "thought", "text", "finish", "tokens"), ANSWERS)
async def test_thinking_is_split_off_alike_in_both_modes(
    mesh: World, answer: str, thought: str, text: str, finish: str, tokens: int
) -> None:
    mesh.worker.behaviour.script = text_script(answer)
    draw = random.Random(answer)
    counts = set()
    for _ in range(4):
        mesh.worker.behaviour.tokens_per_step = lambda step: draw.choice([1, 2, 7, 50])
        whole = (await mesh.chat("go")).json()
        message = whole["choices"][0]["message"]
        assert message.get("reasoning_content", "") == thought
        assert ("reasoning_content" in message) is bool(thought)
        assert message["content"] == text
        assert whole["choices"][0]["finish_reason"] == finish
        counts.add(whole["usage"]["completion_tokens_details"]["reasoning_tokens"])
        chunks = events((await mesh.chat("go", stream=True)).text)
        assert thought_of(chunks, "reasoning_content") == thought
        assert thought_of(chunks, "content") == text
    # A byte each here: from the end of the first mark to that of the second, or of the answer.
    assert counts == {tokens}


async def test_calls_may_follow_thinking(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script(
        '<think>ping it</think>\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": "ping"}}]
    whole = (await mesh.chat("go", tools=tools)).json()["choices"][0]
    assert whole["message"]["reasoning_content"] == "ping it"
    assert whole["message"]["content"] is None
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}
    assert whole["finish_reason"] == "tool_calls"


async def test_what_the_template_does_not_know_is_refused(mesh: World) -> None:
    for extra, param in (
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ):
        answer = await mesh.chat(**extra)
        assert answer.status_code == 400, extra
        assert answer.json()["error"]["param"] == param


def test_the_effort_is_said_in_the_words_of_the_template() -> None:
    switch = JinjaChatTemplate("{% if enable_thinking is false %}<think></think>{% endif %}")
    level = JinjaChatTemplate("{{ reasoning_effort }}{{ messages[0].content }}")
    plain = JinjaChatTemplate("{{ messages[0].content }}")
    with_switch = replace(SCRIPT, chat_template=switch, reasoning="think")
    assert variables(with_switch, "none", {}) == {"enable_thinking": False}
    assert variables(with_switch, "low", {}) == {"enable_thinking": True}
    assert variables(with_switch, "low", {"enable_thinking": False}) == {"enable_thinking": False}
    assert variables(with_switch, None, {}) == {}
    assert variables(replace(SCRIPT, chat_template=level), "high", {}) == {"reasoning_effort": "high"}
    assert variables(replace(SCRIPT, chat_template=plain), "none", {}) == {}
    for text, effort in (
        (replace(SCRIPT, chat_template=plain), "low"),
        (replace(SCRIPT, reasoning="think"), "none"),
    ):
        with pytest.raises(InvalidRequest):
            variables(text, effort, {})


def test_an_operator_has_the_last_word() -> None:
    parsers = parsers_of("hermes,a=mistral", "a=think,b=none")
    thinking = replace(SCRIPT, reasoning="think")
    assert parsers.of("a", SCRIPT).tool_format == "mistral"
    assert parsers.of("x", SCRIPT).tool_format == "hermes"
    assert parsers.of("a", SCRIPT).reasoning == "think"
    assert parsers.of("b", thinking).reasoning is None
    assert parsers.of("x", thinking).reasoning == "think"
    for wrong in ("nothing", "a=nothing", 3):
        with pytest.raises(ConfigError):
            parsers_of(wrong, "")


async def test_a_slow_template_is_ended_and_costs_the_loop_nothing(
    mesh: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.core.texts.RENDER_S", 0.2)
    served = mesh.router.texts.loaded("tiny")
    assert served is not None
    loops = "".join("{% for _ in messages %}" for _ in range(12)) + "{% endfor %}" * 12
    monkeypatch.setattr(type(served), "text", replace(served.text, chat_template=JinjaChatTemplate(loops)))
    answer = await mesh.chat(messages=[{"role": "user", "content": "x"}] * 50)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "template_too_slow"
