"""Hand-overs while the KV store is away: decode computes their prompts itself, on pages that it had."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvmesh.v1 import decode_pb2

from engine import load
from engine.generate import Generation, generate_batch
from engine.sampling import SamplingParams
from tests.decode.mini_mesh import LIVENESS_S, Handoff, MiniMesh, P, TestRouter, mini_mesh
from tests.decode.test_worker import TOKENS, alone, prompt

PAGES = 2048
# What a worker keeps ready of them.
READY = PAGES // 32


@pytest.fixture
async def mesh() -> AsyncIterator[MiniMesh]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        async with mini_mesh(Path(name), pages=PAGES) as made:
            await granted(made)
            yield made


async def granted(mesh: MiniMesh) -> None:
    """Waits until the worker has its pages."""
    async with asyncio.timeout(LIVENESS_S):
        while (await mesh.stats()).granted < READY:  # noqa: ASYNC110 (another process's books)
            await asyncio.sleep(0.02)


async def lose_store(mesh: MiniMesh) -> None:
    await mesh.services.pop("kvstore-0").stop()


async def pending(router: TestRouter, tokens: list[int], **changes: Any) -> Handoff:
    """A request whose prompt nobody brings."""
    handoff = router.open(router.message(tokens, **changes))
    await handoff.until("reserved")
    return handoff


async def test_what_comes_while_the_store_is_away_is_computed_here(mesh: MiniMesh) -> None:
    seeded: dict[str, Any] = {"temperature": 0.9, "seed": 99}
    whole, n = 12, 3
    tokens = prompt(whole * P + 5)
    async with TestRouter(mesh) as router:
        await lose_store(mesh)
        greedy = await router.generate(tokens)
        assert greedy.alone
        assert greedy.have == 0
        assert greedy.computed_prompt_tokens == len(tokens)
        assert greedy.tokens[0] == alone([tokens])[0]
        several = await router.generate(tokens, n=n, sampling=seeded)
        for choice in range(n):
            assert several.tokens[choice] == alone([tokens], choice, **seeded)[0]
        short = await router.generate(prompt(3))
        assert short.alone
        assert short.tokens[0] == alone([prompt(3)])[0]
        await mesh.start("kvstore", "kvstore-0")
        await mesh.nothing_leased()
        # Prefill may not have found the store yet.
        again = await router.generate(tokens, prefill=None)
        assert not again.alone
        assert again.tokens[0] == greedy.tokens[0]
        await mesh.nothing_leased()


async def test_a_pending_hand_over_goes_on_and_is_committed_when_the_store_is_back(mesh: MiniMesh) -> None:
    tokens, long = prompt(9 * P + 1), 400
    [right] = generate_batch(
        load("tiny:seed=1"), [Generation(tokens, SamplingParams(temperature=0.0, seed=7), long)]
    )
    async with TestRouter(mesh) as router:
        known = await router.generate(tokens[: 4 * P + 1])
        assert known.have == 0
        handoff = await pending(router, tokens, max_tokens=long, credit=40)
        assert handoff.answer.have == 4
        await lose_store(mesh)
        again = await handoff.until("reserved")
        assert (again.alone, again.have) == (True, 4)
        serving = asyncio.create_task(handoff.finish())
        await asyncio.wait_for(handoff.first_row.wait(), LIVENESS_S)
        await mesh.start("kvstore", "kvstore-0")
        await granted(mesh)
        router.send(credit=decode_pb2.Credit(handoff_id=handoff.id, tokens=long))
        # Its first source comes late: it is not needed any more.
        handoff.sources(2, None)
        answer = await serving
        assert answer.tokens[0] == right
        assert answer.computed_prompt_tokens == len(tokens) - 4 * P
        await mesh.nothing_leased()
        # All that it computed was committed: prompt and answer, but for the last token.
        following = await router.generate([*tokens, *right], prefill=None)
        assert following.have == (len(tokens) + long - 1) // P
        await mesh.nothing_leased()


async def test_blocks_that_another_committed_meanwhile_are_the_same(mesh: MiniMesh) -> None:
    tokens = prompt(6 * P + 1)
    async with TestRouter(mesh) as router:
        both = [await pending(router, tokens) for _ in range(2)]
        await lose_store(mesh)
        for handoff in both:
            assert (await handoff.until("reserved")).alone
        await mesh.start("kvstore", "kvstore-0")
        answers = await asyncio.gather(*(handoff.finish() for handoff in both))
        assert [a.tokens[0] for a in answers] == alone([tokens]) * 2
        await mesh.nothing_leased()


async def test_what_the_grant_does_not_hold_waits_for_the_store(mesh: MiniMesh) -> None:
    tokens = prompt((READY + 4) * P)
    async with TestRouter(mesh) as router:
        handoff = await pending(router, tokens)
        await lose_store(mesh)
        refused = await router.generate(tokens)
        assert refused.ending == "NO_STORE"
        await mesh.start("kvstore", "kvstore-0")
        # Its reservation died with the store: it is to be placed again.
        assert (await handoff.finish()).ending == "PREEMPTED"
        answer = await router.generate(tokens, prefill=None)
        assert answer.tokens[0] == alone([tokens])[0]
        await mesh.nothing_leased()


async def test_one_that_leaves_while_the_store_is_away_leaves_nothing(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        handoff = await pending(router, prompt(8 * P))
        await lose_store(mesh)
        await handoff.until("reserved")
        handoff.cancel()
        assert (await handoff.finish()).ending == "CANCELLED"
        held = READY
        for _ in range(4):
            # As many as fit once: had the first kept its pages, the last would be refused.
            answer = await router.generate(prompt((held - 4) * P, 3), max_tokens=TOKENS)
            assert answer.ending == "FINISHED"
        await mesh.start("kvstore", "kvstore-0")
        await mesh.nothing_leased()
