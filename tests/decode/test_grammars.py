"""Answers that obey a grammar, through a real decode worker: choices, drafts, seeds, preemption, a successor."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kvmesh.v1 import common_pb2

from tests.decode.mini_mesh import MiniMesh, TestRouter, mini_mesh
from tests.text.schemas import random_schema
from text import load_text_model
from text.grammar import GrammarError, Grammars
from text.grammar.forms import of_regex, of_schema

END = 257
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
PROMPT = list(b"a point, please")


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        yield Path(name)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[MiniMesh]:
    async with mini_mesh(directory, prefill=0) as mesh:
        yield mesh


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


async def generate(router: TestRouter, grammar: str, **changes: Any) -> Any:
    values: dict[str, Any] = {"grammar": grammar, "stop_ids": [END], "max_tokens": 300, **changes}
    return await router.generate(PROMPT, prefill=None, **values)


async def test_a_random_model_says_what_the_schema_wants(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        for temperature in (0.0, 1.5):
            answer = await generate(
                router,
                of_schema(POINT),
                sampling={"temperature": temperature, "logprobs": 2},
                n=3,
                min_tokens=70,
            )
            for choice in range(3):
                jsonschema.validate(json.loads(text(answer.tokens[choice])), POINT)
                assert answer.finish[choice] == common_pb2.FINISH_REASON_STOP
                assert len(answer.logprobs[choice]) == len(answer.tokens[choice])
            if temperature:
                assert len({tuple(answer.tokens[choice]) for choice in range(3)}) > 1


async def test_a_seed_gives_the_same_answer_alone_and_in_company(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        wanted = {"sampling": {"temperature": 1.2, "seed": 5}}
        first = await generate(router, of_schema(POINT), **wanted)
        others = [router.open(router.message(PROMPT, max_tokens=60)) for _ in range(3)]
        for other in others:
            await router._first(other)
        again = await generate(router, of_schema(POINT), **wanted)
        assert again.tokens == first.tokens
        for other in others:
            await other.finish()


async def test_a_successor_goes_on_where_the_answer_was(mesh: MiniMesh) -> None:  # B66
    async with TestRouter(mesh) as router:
        wanted: dict[str, Any] = {"sampling": {"temperature": 1.2, "seed": 11}}
        whole = (await generate(router, of_schema(POINT), **wanted)).tokens[0]
        for cut in range(1, len(whole)):
            rest = await router.serve(
                router.open(
                    router.message(
                        [*PROMPT, *whole[:cut]],
                        generated=cut,
                        grammar=of_schema(POINT),
                        stop_ids=[END],
                        max_tokens=300,
                        sampling=wanted["sampling"],
                    )
                ),
                prefill=None,
            )
            assert whole[:cut] + rest.tokens[0] == whole
            assert rest.finish[0] == common_pb2.FINISH_REASON_STOP


async def test_the_end_needs_no_token_and_no_end_token_is_forced(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        answer = await generate(router, of_regex("abc"), stop_ids=[])
        assert text(answer.tokens[0]) == "abc"
        assert answer.finish[0] == common_pb2.FINISH_REASON_STOP
        cut = await generate(router, of_regex("abcdef"), max_tokens=3)
        assert text(cut.tokens[0]) == "abc"
        assert cut.finish[0] == common_pb2.FINISH_REASON_LENGTH
        stopped = await generate(router, of_regex("abcdef"), stop_ids=[END, ord("c")])
        assert text(stopped.tokens[0]) == "abc"
        early = await generate(router, of_regex("x+"), stop_ids=[ord("x")], min_tokens=20)
        assert early.ending == "FINISHED", early.message


async def test_drafts_are_held_to_the_grammar(directory: Path) -> None:  # B50 B52
    async with mini_mesh(directory, "script:", prefill=0) as mesh, TestRouter(mesh) as router:
        script = '{"x": 7, "on": true} and then some prose'
        for split in ("1", "2,3", "40"):
            message = router.message(
                list(script.encode()),
                grammar=of_schema(POINT),
                metadata={"script_split": split},
                max_tokens=100,
                stop_ids=[END],
            )
            answer = await router.serve(router.open(message), prefill=None)
            assert text(answer.tokens[0]) == '{"x": 7, "on": true}'
            assert answer.finish[0] == common_pb2.FINISH_REASON_STOP


async def test_a_grammar_that_is_none_is_refused_and_nothing_else_is_hurt(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        refused = await router.serve(router.open(router.message(PROMPT, grammar="start: (")), prefill=None)
        assert refused.ending == "INVALID"
        assert refused.error.param == "grammar"
        wrong = router.message([*PROMPT, *b"zz"], generated=2, grammar=of_regex("abc"))
        assert (await router.serve(router.open(wrong), prefill=None)).ending == "INVALID"
        answer = await generate(router, of_regex("abc"))
        assert text(answer.tokens[0]) == "abc"
    await mesh.nothing_leased()


async def schemas(mesh: MiniMesh, count: int) -> Counter[str]:
    """Random schemas: every answer validates, was cut, or was refused before it began."""
    tiny = load_text_model("tiny:")
    grammars = Grammars(tiny.tokenizer, tiny.end_ids, tiny.vocab_size)
    found: Counter[str] = Counter()
    gate = asyncio.Semaphore(8)

    async def one(router: TestRouter, seed: int) -> None:
        schema = random_schema(random.Random(seed))
        try:
            grammar = of_schema(schema)
            grammars.compile(grammar)
        except GrammarError:
            found["refused"] += 1
            return
        async with gate:
            sampling = {"temperature": 1.0, "seed": seed}
            answer = await generate(router, grammar, max_tokens=200, sampling=sampling)
        assert answer.ending == "FINISHED", (schema, answer.message)
        if answer.finish[0] == common_pb2.FINISH_REASON_LENGTH:
            found["length"] += 1
            return
        value = json.loads(text(answer.tokens[0]))
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        found["valid"] += 1

    async with TestRouter(mesh) as router, asyncio.TaskGroup() as group:
        for seed in range(count):
            group.create_task(one(router, seed))
    assert found.total() == count
    return found


async def test_answers_to_random_schemas_validate(mesh: MiniMesh) -> None:
    found = await schemas(mesh, 50)
    assert found["valid"] > 10


@pytest.mark.slow
async def test_answers_to_a_thousand_random_schemas_validate(mesh: MiniMesh) -> None:
    found = await schemas(mesh, 1000)
    print(found)
    assert found["valid"] > 300


async def test_requests_that_leave_while_their_grammar_is_compiled_leave_nothing(
    mesh: MiniMesh,
) -> None:  # B49
    async with TestRouter(mesh) as router:
        handoffs = []
        for number in range(30):
            properties = {f"p{number}x{i}": {"type": "string"} for i in range(150)}
            grammar = of_schema({"type": "object", "properties": properties, "additionalProperties": False})
            # Those that leave would go on for long.
            most = 4 if number % 2 else 400
            message = router.message(
                PROMPT, grammar=grammar, stop_ids=[END], min_tokens=most, max_tokens=most
            )
            handoffs.append(router.open(message))
        for handoff in handoffs[::2]:
            handoff.cancel()
        for handoff in handoffs[1::2]:
            answer = await router.serve(handoff, prefill=None)
            assert answer.ending == "FINISHED", answer.message
        for handoff in handoffs[::2]:
            assert (await handoff.finish()).ending == "CANCELLED"
        answer = await generate(router, of_regex("abc"))
        assert text(answer.tokens[0]) == "abc"
    await mesh.nothing_leased()
