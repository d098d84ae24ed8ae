"""How likely the model finds a prompt: the decode worker says it of every token after the first."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from kvmesh.v1 import common_pb2

from engine import Executor, Slice, load
from engine.sampling import Sampled, score
from tests.decode.mini_mesh import MiniMesh, P, TestRouter, mini_mesh

ALTERNATIVES = 3


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        yield Path(name)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[MiniMesh]:
    async with mini_mesh(directory, prefill=0) as mesh:
        yield mesh


def alone() -> Executor:
    executor = load("tiny:seed=1")
    layout = executor.info.layout
    executor.bind(bytearray(64 * layout.page_bytes), 64, layout.page_bytes)
    return executor


def right(executor: Executor, tokens: Sequence[int]) -> list[Sampled]:
    [logits] = executor.step([Slice(tokens, 0, range(64), logits=len(tokens))])
    scored = score(logits[:-1], tokens[1:], ALTERNATIVES)  # type: ignore[index]
    assert all(isinstance(item, Sampled) for item in scored)
    return scored  # type: ignore[return-value]


def same(said: Sequence[common_pb2.PositionLogprobs], expected: Sequence[Sampled]) -> bool:
    if len(said) != len(expected):
        return False
    return all(
        position.logprob == pytest.approx(item.logprob, abs=1e-6)
        and [other.id for other in position.top] == [token for token, _ in item.top]
        and [other.logprob for other in position.top] == pytest.approx([v for _, v in item.top], abs=1e-6)
        for position, item in zip(said, expected, strict=True)
    )


async def test_every_prompt_token_is_scored_and_nothing_is_left_in_the_cache(mesh: MiniMesh) -> None:
    executor = alone()
    async with TestRouter(mesh) as router:
        for length in (1, 2, P, P + 1, 2 * P, 150):
            tokens = random.Random(length).choices(range(256), k=length)
            expected = right(executor, tokens)
            plain = await router.generate(tokens, prefill=None, max_tokens=3)
            router.root = bytes(random.Random(length).choices(range(256), k=16))
            for n in (1, 3):
                answer = await router.generate(
                    tokens, prefill=None, max_tokens=3, n=n, prompt_logprobs=ALTERNATIVES
                )
                assert answer.have == 0
                assert answer.computed_prompt_tokens == length
                assert answer.tokens[0] == plain.tokens[0]
                for choice in range(n):
                    assert same(answer.prompt_logprobs[choice], expected), (length, n, choice)
        await mesh.nothing_leased()


async def test_a_continuation_is_not_scored_again(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        message = router.message([1, 2, 3], generated=1, prompt_logprobs=0)
        answer = await router.serve(router.open(message))
        assert answer.ending == "INVALID"
        assert answer.error.param == "prompt_logprobs"
