"""What a grammar costs on a real model: printed, and held to a generous limit. Run alone on a quiet machine."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mesh.models import resolve
from tests.decode.mini_mesh import TestRouter, mini_mesh
from text import AnswerForm, AnswerParser, load_text_model
from text.grammar import Calls, Grammars
from text.grammar.forms import mark_of, of_calls, of_schema
from text.parts import ToolCallArguments, ToolCallStart
from text.tool_parsers import FORMATS
from text.tool_parsers.lark import Function

pytestmark = [pytest.mark.slow, pytest.mark.model]

PEOPLE = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"enum": ["friend", "foe", "neither"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
BATCH, TOKENS, ROUNDS = 16, 96, 3


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model on a busy machine: a liveness limit all the same."""
    monkeypatch.setattr("tests.decode.mini_mesh.LIVENESS_S", 300.0)


async def test_a_grammar_costs_little_at_batch_16() -> None:
    path = resolve("pkg:smollm2", Path(tempfile.gettempdir())).path
    text = load_text_model(path)
    prompt = text.tokenizer.encode("A list of people, as JSON:\n", add_special=True, parse_special=True)

    async def batch(router: TestRouter, grammar: str) -> float:
        async def one(seed: int) -> Any:
            return await router.generate(
                prompt,
                prefill=None,
                grammar=grammar,
                max_tokens=TOKENS,
                sampling={"temperature": 0.8, "seed": seed},
            )

        started = time.perf_counter()
        answers = await asyncio.gather(*[one(seed) for seed in range(BATCH)])
        took = time.perf_counter() - started
        assert all(len(answer.tokens[0]) == TOKENS for answer in answers)
        return took

    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        options: dict[str, Any] = {"executor": "cpu", "threads": 2}
        async with (
            mini_mesh(Path(name), path, pages=512, prefill=0, **options) as mesh,
            TestRouter(mesh) as router,
        ):
            await batch(router, of_schema(PEOPLE))
            await batch(router, "")
            plain = held = float("inf")
            for _ in range(ROUNDS):
                plain = min(plain, await batch(router, ""))
                held = min(held, await batch(router, of_schema(PEOPLE)))
    step = plain / TOKENS
    print(f"\nbatch {BATCH}: a step {step * 1e3:.1f} ms, with a grammar {held / TOKENS * 1e3:.1f} ms"
          f" ({(held / plain - 1) * 100:+.1f} %)")  # fmt: skip
    assert held < plain * 1.5


@pytest.mark.parametrize("source", ["pkg:smollm2"])
def test_masks_and_compiling_take_microseconds(source: str) -> None:
    text = load_text_model(resolve(source, Path(tempfile.gettempdir())).path)
    started = time.perf_counter()
    grammars = Grammars(text.tokenizer, text.end_ids, text.vocab_size)
    built = time.perf_counter() - started
    started = time.perf_counter()
    matcher = grammars.compile(of_schema(PEOPLE))
    compiled = time.perf_counter() - started
    row = '{"name": "Bob the builder", "age": 33, "kind": "friend"}, '
    tokens = text.tokenizer.encode("[" + row * 8, add_special=False, parse_special=False)
    masks, takes = 0.0, 0.0
    for token in tokens:
        started = time.perf_counter()
        [mask] = matcher.allowed()
        between = time.perf_counter()
        assert mask[token]
        assert matcher.take([token])
        masks += between - started
        takes += time.perf_counter() - between
    print(f"\n{source}: vocabulary {built * 1e3:.0f} ms, compiling {compiled * 1e3:.2f} ms,"
          f" a mask {masks / len(tokens) * 1e6:.0f} us, a token taken {takes / len(tokens) * 1e6:.0f} us")  # fmt: skip
    assert masks / len(tokens) < 0.01


@pytest.mark.parametrize("form", FORMATS)
async def test_the_smallest_model_makes_a_valid_call(form: str) -> None:
    path = resolve("pkg:smollm2", Path(tempfile.gettempdir())).path
    text = load_text_model(path)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    grammar = of_calls(
        Calls(form, [Function("weather", schema)], forced=True, many=False), mark_of(lambda t: None)
    )
    prompt = text.tokenizer.encode("How warm is it in Oslo?\n", add_special=True, parse_special=True)
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        async with (
            mini_mesh(Path(name), path, pages=128, prefill=0, executor="cpu") as mesh,
            TestRouter(mesh) as router,
        ):
            answer = await router.generate(
                prompt, prefill=None, grammar=grammar, max_tokens=200, stop_ids=sorted(text.end_ids)
            )
    said = b"".join(text.tokenizer.piece(token) for token in answer.tokens[0]).decode()
    parser = AnswerParser(AnswerForm(tools=form, functions=frozenset({"weather"})))
    parts = parser.push(said) + parser.end()
    [start] = [part for part in parts if isinstance(part, ToolCallStart)]
    arguments = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
    assert start.name == "weather"
    jsonschema.validate(json.loads(arguments), schema)
