"""However a worker cuts an answer into steps, the client gets the same: text, calls, thoughts, logprobs, finish."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.fakes import text_script
from tests.router.test_tools import PLAN, merged
from tests.router.world import World, events, world

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("plan", "ping")]
WORDS = [
    "ž",
    "🫠",
    "龘",
    "STOP",
    "ST",
    "OP-HERE",
    "<th",
    "ink>",
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    " ",
    "\n",
    "ok",
]
CALL = f'<tool_call>\n{{"name": "plan", "arguments": {PLAN}}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


def an_answer(draw: random.Random) -> str:
    text = "".join(draw.choices(WORDS, k=draw.randint(0, 12)))
    thought = draw.choice(["", "", f"<think>{text[::-1]}</think>\n"])
    calls = draw.choice(["", "", CALL, f"{PING}\n{CALL}", CALL[: draw.randint(0, len(CALL))]])
    return thought + text + calls


def a_wish(draw: random.Random) -> dict[str, Any]:
    wish: dict[str, Any] = {"tools": TOOLS, "logprobs": draw.random() < 0.5, "top_logprobs": None}
    if draw.random() < 0.5:
        wish["stop"] = draw.choice([["STOP"], ["STOP-HERE", "OP"], ["\n"], ["龘🫠"], ["}"]])
    if draw.random() < 0.3:
        wish["max_tokens"] = draw.randint(1, 60)
    return wish


def seen(chunks: list[Any]) -> Any:
    add = merged(chunks)
    thought = "".join(
        c["choices"][0]["delta"].get("reasoning_content", "")
        for c in chunks
        if c != "[DONE]" and c["choices"]
    )
    calls = [(call["name"], call["arguments"]) for call in add["tool_calls"]]
    return thought, add["content"] or "", calls, add["logprobs"], add["finish"]


def steps(draw: random.Random, sizes: list[int]) -> Callable[[int], int]:
    return lambda step: draw.choice(sizes)


async def split(mesh: World, cases: int, splits: int) -> None:
    for number in range(cases):
        draw = random.Random(number)
        answer, wish = an_answer(draw), a_wish(draw)
        mesh.worker.behaviour.script = text_script(answer)
        mesh.worker.behaviour.tokens_per_step = lambda step: 1
        whole = (await mesh.chat("go", **wish)).json()["choices"][0]
        message = whole["message"]
        expected = (
            message.get("reasoning_content", ""),
            message["content"] or "",
            [
                (call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", ())
            ],
            (whole["logprobs"] or {"content": []})["content"] if "logprobs" in whole else [],
            whole["finish_reason"],
        )
        for stop in wish.get("stop", ()):
            assert stop not in expected[1]
        for _ in range(splits):
            sizes = draw.choice([[1], [1, 2], [1, 2, 3, 5], [7, 1], [500]])
            mesh.worker.behaviour.tokens_per_step = steps(draw, sizes)
            streamed = await mesh.chat("go", stream=True, **wish)
            for line in streamed.content.split(b"\n\n"):
                line.decode("utf-8", "strict")
            chunks = events(streamed.text)
            assert chunks[-1] == "[DONE]"
            assert seen(chunks) == expected, (answer, wish)
            assert "\ufffd" not in expected[0] + expected[1]


async def test_every_cut_of_an_answer_gives_the_same() -> None:
    async with world(reasoning_parser="think", tool_parser="hermes") as mesh:
        await split(mesh, 30, 4)


@pytest.mark.slow
async def test_ten_thousand_cuts_give_the_same() -> None:
    async with world(reasoning_parser="think", tool_parser="hermes") as mesh:
        await split(mesh, 500, 20)
