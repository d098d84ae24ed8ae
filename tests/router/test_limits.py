"""Every bound, through the OpenAI face: what is refused names its field, what is allowed arrives."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import InvalidRequest
from router.core.limits import checked
from router.core.request import Ask, Sampling, Stopping
from tests.router.world import World, chat_body, world

ID_LIMIT = 261

CHAT: list[tuple[str, dict[str, Any]]] = [
    *[("logit_bias", {"logit_bias": bias}) for bias in (
        {"272": 5}, {str(ID_LIMIT): 5}, {"-1": 5}, {"abc": 5}, {"12": 1e9}, {"12": None}, {"12": "5"}, [1],
        {"1": 1, "01": 1},
        {str(i): 1 for i in range(301)},
    )],
    *[("top_logprobs", {"logprobs": True, "top_logprobs": k}) for k in (2_000_000_000, -1, 21, 2.0, True)],
    ("logprobs", {"logprobs": 1}),
    *[("n", {"n": n}) for n in (0, -1, 129, 100_000, 1.0, True, "1")],
    *[("temperature", {"temperature": t}) for t in (2.1, -0.1, "NaN", True, [1], 10**400)],
    *[("top_p", {"top_p": p}) for p in (-0.1, 1.5)],
    *[("top_k", {"top_k": k}) for k in (-2, 1.5, 2**40)],
    *[("min_p", {"min_p": p}) for p in (-0.1, 1.1)],
    *[("repetition_penalty", {"repetition_penalty": p}) for p in (0, -1, 1000)],
    *[("presence_penalty", {"presence_penalty": p}) for p in (-2.1, 2.1)],
    ("frequency_penalty", {"frequency_penalty": 3}),
    *[("seed", {"seed": s}) for s in (2**63, -(2**63) - 1, 1.5, "1", 10**30)],
    *[("stop", {"stop": s}) for s in (["a"] * 5, "", [""], ["a", 1], 5, "x" * 1025, {"a": 1})],
    *[("stop_token_ids", {"stop_token_ids": s}) for s in ([ID_LIMIT], [-1], ["1"], [True], 5, [1] * 65)],
    *[("max_completion_tokens", {"max_completion_tokens": m}) for m in (0, -1, 1.5, 10**9)],
    *[("max_tokens", {"max_tokens": m}) for m in (0, -1, 2**40)],
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("min_tokens", {"min_tokens": -1}),
    *[("messages", {"messages": m}) for m in (
        [], None, "hi", [1], [{"role": "user"}], [{"content": "x"}], [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": []}], [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "x", "color": "red"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    )],
    *[("metadata", {"metadata": m}) for m in (
        {"a": 1}, "x", {str(i): "x" for i in range(17)}, {"k" * 65: "x"}, {"k": "x" * 513},
    )],
    *[(name, {name: value}) for name, value in (
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{"name": "f g"}]),
        ("response_format", {"type": "json"}), ("modalities", ["audio"]), ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}), ("web_search_options", {}), ("reasoning_effort", "high"),
        ("verbosity", "low"), ("best_of", 2), ("echo", True), ("guided_json", 5), ("guided_regex", "("), ("guided_choice", []), ("structured_outputs", {}), ("temprature", 1),
    )],
    ("service_tier", {"service_tier": "gold"}),
    ("safety_identifier", {"safety_identifier": "x" * 65}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("stream_options", {"stream": True, "stream_options": {"other": True}}),
    ("model", {"model": ""}),
    ("model", {"model": None}),
    ("model", {"model": 5}),
]  # fmt: skip

PROMPTS: list[Any] = [
    "", [""], [], [[]], None, [-1], [ID_LIMIT], [272], [1.5], [True], [2**40], [2**70], ["7", 3],
    [[1], "a"], [[1], []], {"a": 1}, 5, ["x"] * 129,
]  # fmt: skip

COMPLETION: list[tuple[str, dict[str, Any]]] = [
    *[("prompt", {"prompt": prompt}) for prompt in PROMPTS],
    *[("logprobs", {"logprobs": k}) for k in (-1, 6, 50, True)],
    ("n", {"prompt": ["x"] * 9, "n": 128}),
    *[("best_of", {"best_of": b, "n": 2}) for b in (1, 21)],
    ("best_of", {"best_of": 3, "stream": True}),
    *[("prompt", {"prompt": [ID_LIMIT], "echo": True, "logprobs": k}) for k in (None, 1)],
    ("echo", {"echo": "yes"}),
    ("echo", {"echo": True, "suffix": "end"}),
    ("suffix", {"suffix": "end"}),
    ("suffix", {"suffix": 5}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": []}),
]  # fmt: skip

FINE: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 2}, {"temperature": 1e-12}, {"top_p": 1e-9}, {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10_000}, {"min_p": 0}, {"min_p": 1}, {"logit_bias": {"260": 100, "0": -100}}, {"n": 128},
    {"seed": -(2**63)}, {"stop": None}, {"stop": []}, {"stop": ["a", "b", "c", "d"]}, {"stop_token_ids": []},
    {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
    {"modalities": ["text"]}, {"parallel_tool_calls": True},
    {"user": "u", "store": True, "service_tier": "flex"},
    {"metadata": {"a": "b"}}, {"prompt_cache_key": "k"}, {"max_tokens": 5, "max_completion_tokens": 3},
    {"min_tokens": 2, "max_tokens": 2}, {"ignore_eos": True, "max_tokens": 3}, {"repetition_penalty": 1.2},
    {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "name": "n", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
]  # fmt: skip


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0) as made:
        yield made


async def test_bad_chat_requests_are_refused_by_name_and_reach_no_worker(mesh: World) -> None:  # B16 B18 B19
    for param, extra in CHAT:
        for stream in (False, True):
            answer = await mesh.chat(**{"stream": stream, **extra})
            check_refused(answer, param, extra)
    assert not mesh.worker.opened
    assert (await mesh.chat()).status_code == 200


async def test_bad_completion_requests_are_refused_by_name(mesh: World) -> None:  # B23 B24
    for param, extra in COMPLETION:
        check_refused(await mesh.complete(**extra), param, extra)
    assert not mesh.worker.opened
    for prompt in ([260], [0], "x", " ", ["x"], [[1, 2]]):
        assert (await mesh.complete(prompt)).status_code == 200


def check_refused(answer: Any, param: str, extra: Any) -> None:
    assert answer.status_code == 400, (extra, answer.text)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param), (extra, error)
    assert param in error["message"] or error["code"] == "context_length_exceeded", (extra, error)
    assert isinstance(error["code"], str)
    assert answer.headers["x-request-id"]
    assert len(answer.text) < 1000


async def test_what_is_in_bounds_is_served(mesh: World) -> None:
    for extra in FINE:
        answer = await mesh.chat(**extra)
        assert answer.status_code == 200, (extra, answer.text)
    mesh.worker.opened.clear()
    await mesh.chat(max_tokens=5, max_completion_tokens=3)
    assert mesh.worker.opened[0].stop.max_tokens == 3
    await mesh.complete("x")
    assert mesh.worker.opened[1].stop.max_tokens == 16


async def test_the_context_bounds_prompt_and_answer(mesh: World) -> None:
    served = mesh.router.texts.loaded("tiny")
    assert served is not None
    context = served.text.context_length
    for prompt, extra in (
        ("a" * context, {}),
        ("a" * 100, {"max_tokens": context - 99}),
        ("a" * 1_500_000, {}),
    ):
        answer = await mesh.complete(prompt, **extra)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert str(context) in answer.json()["error"]["message"]
    assert (await mesh.complete("a" * (context - 5))).json()["usage"]["completion_tokens"] == 5
    assert (await mesh.chat("a" * 1_500_000)).json()["error"]["code"] == "context_length_exceeded"


async def test_a_body_has_one_limit(mesh: World) -> None:  # B102
    for size, status in ((8 * 1024 * 1024, 400), (8 * 1024 * 1024 + 1, 413)):
        answer = await mesh.post("/v1/completions", b" " * size)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == ("invalid_json" if status == 400 else "request_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 1024 * 1024

    endless = await mesh.client.post("/v1/completions", content=chunks(), headers=mesh.headers())
    assert endless.status_code == 413


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_the_core_checks_by_itself(value: float) -> None:
    """The gRPC face has no JSON reader in front of it."""
    for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
        with pytest.raises(InvalidRequest, match=field):
            bounded(replace(Sampling(), **{field: value}))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="logit_bias"):
        bounded(Sampling(logit_bias={1: value * 1000}))
    assert bounded(Sampling()).stopping.max_tokens == 99


def bounded(sampling: Sampling) -> Ask:
    return checked(
        Ask("m", ([1],), sampling=sampling, stopping=Stopping()), vocab_size=50, context_length=100
    )


async def test_long_lists_of_stop_strings_are_refused_before_they_are_work(mesh: World) -> None:  # B30
    for stop in (["x"] * 500_000, [""], "", ["a"] * 5, [1], ["x" * 1_000_000]):
        body = json.dumps(chat_body("hello", stop=stop)).encode()
        before = time.process_time()
        answer = await mesh.post("/v1/chat/completions", body)
        spent = time.process_time() - before
        assert answer.status_code == 400, str(stop)[:40]
        assert answer.json()["error"]["param"].startswith("stop")
        # 0.07 s of the processor for the longest; more only if the strings themselves are worked on.
        assert spent < 0.5, f"{spent:.2f} s for {len(body)} bytes"
    assert (await mesh.chat("hello", stop=None)).status_code == 200
    assert not [opened for opened in mesh.worker.opened if opened.stop.stop]
