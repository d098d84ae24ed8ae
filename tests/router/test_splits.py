"""However a worker cuts an answer into steps, the client gets the same: text, calls, thoughts, logprobs, finish.

In every format of calls; the answers are pieces of those that the parsers' own tests take apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.fakes import text_script
from tests.router.test_tools import merged
from tests.router.world import World, events, world
from tests.text.test_answer_parser import CASES
from text.tool_parsers import FORMATS

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("plan", "ping", "add")]
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


def an_answer(draw: random.Random, form: str) -> str:
    words = [*WORDS, *FORMATS[form].MARKS]
    text = "".join(draw.choices(words, k=draw.randint(0, 12)))
    thought = draw.choice(["", "", f"<think>{text[::-1]}</think>\n"])
    call = draw.choice([answer for name, answer, _, calls in CASES if name == form and calls])
    # Calls of some formats are the whole answer, or none.
    calls = draw.choice(["", call, call, call[: draw.randint(0, len(call))]])
    return thought + draw.choice(["", "", text]) + calls


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


async def split(mesh: World, form: str, cases: int, splits: int) -> int:
    """How many of the answers held calls."""
    called = 0
    for number in range(cases):
        draw = random.Random(f"{form} {number}")
        answer, wish = an_answer(draw, form), a_wish(draw)
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
        called += bool(expected[2])
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
    return called


@pytest.mark.parametrize("form", FORMATS)
async def test_every_cut_of_an_answer_gives_the_same(form: str) -> None:
    async with world(reasoning_parser="think", tool_parser=form) as mesh:
        assert await split(mesh, form, 7, 3)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
async def test_ten_thousand_cuts_give_the_same(form: str) -> None:
    async with world(reasoning_parser="think", tool_parser=form) as mesh:
        assert await split(mesh, form, 75, 20) > 10
