"""The decode worker over its real seams: a session, the store's sockets, a prefill worker."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvmesh.v1 import common_pb2, decode_pb2

from engine import load
from engine.generate import Generation, generate_batch
from engine.sampling import SamplingParams
from tests.decode.mini_mesh import LIVENESS_S, MiniMesh, P, TestRouter, mini_mesh

TOKENS = 24


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        yield Path(name)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[MiniMesh]:
    async with mini_mesh(directory) as mesh:
        yield mesh


@pytest.fixture
async def script(directory: Path) -> AsyncIterator[MiniMesh]:
    async with mini_mesh(directory, "script:", prefill=0) as mesh:
        yield mesh


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed} {length}").choices(range(256), k=length)


def alone(prompts: Sequence[Sequence[int]], choice: int = 0, **params: Any) -> list[list[int]]:
    """What the model says in one process."""
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 7, **params})
    generations = [Generation(p, sampling, TOKENS, choice=choice) for p in prompts]
    return generate_batch(load("tiny:seed=1"), generations)


async def test_tokens_are_those_of_one_process_and_decode_computes_only_the_tail(mesh: MiniMesh) -> None:
    lengths = [1, P - 1, P, P + 1, 3 * P - 1, 3 * P, 3 * P + 1, 200]
    prompts = [prompt(length) for length in lengths]
    expected = alone(prompts)
    async with TestRouter(mesh) as router:
        for tokens, right in zip(prompts, expected, strict=True):
            whole = (len(tokens) - 1) // P
            for warm in (False, True):
                answer = await router.generate(tokens)
                assert answer.ending == "FINISHED", answer.message
                assert answer.tokens[0] == right
                assert answer.finish == {0: common_pb2.FINISH_REASON_LENGTH}
                assert answer.computed_prompt_tokens == len(tokens) - whole * P
                assert answer.have == (whole if warm else 0)
                assert answer.ran_prefill == (whole > 0 and not warm)
        await mesh.nothing_leased()


async def test_a_prompt_that_decode_computes_itself_gives_the_same(mesh: MiniMesh) -> None:
    prompts = [prompt(length, 1) for length in (P + 1, 3 * P, 150)]
    async with TestRouter(mesh) as router:
        for tokens, right in zip(prompts, alone(prompts), strict=True):
            answer = await router.generate(tokens, prefill=None)
            assert answer.tokens[0] == right
            assert answer.computed_prompt_tokens == len(tokens)
        again = await router.generate(prompts[-1])
        assert (again.have, again.ran_prefill) == ((150 - 1) // P, False)
        await mesh.nothing_leased()


async def test_what_was_generated_is_found_by_the_next_turn(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        tokens = prompt(40)
        first = await router.generate(tokens, max_tokens=40)
        following = [*tokens, *first.tokens[0], 1, 2, 3]
        answer = await router.generate(following)
        # Of 40 + 40 tokens all but the last have keys and values.
        assert answer.have == (40 + 39) // P
        assert answer.tokens[0] == alone([following])[0]


async def test_choices_are_those_of_one_process_each(mesh: MiniMesh) -> None:
    seeded: dict[str, Any] = {"temperature": 0.9, "seed": 1234}
    async with TestRouter(mesh) as router:
        for length in (5, 2 * P, 2 * P + 3):
            tokens = prompt(length)
            answer = await router.generate(tokens, n=3, sampling=seeded)
            for choice in range(3):
                assert answer.tokens[choice] == alone([tokens], choice, **seeded)[0]
            assert answer.computed_prompt_tokens == length - (length - 1) // P * P
        await mesh.nothing_leased()


async def test_sixteen_at_once_do_not_change_each_other(mesh: MiniMesh) -> None:
    prompts = [prompt(7 + 11 * i, 2) for i in range(16)]
    seeded: dict[str, Any] = {"temperature": 0.9, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    right = alone(prompts[:8]) + alone(prompts[8:], **seeded)
    async with TestRouter(mesh) as router:
        answers = await asyncio.gather(
            *(router.generate(p, sampling={} if i < 8 else seeded) for i, p in enumerate(prompts))
        )
        assert [a.tokens[0] for a in answers] == right
        await mesh.nothing_leased()


async def test_equal_prompts_at_once_are_computed_once(mesh: MiniMesh) -> None:
    tokens = prompt(20 * P + 5)
    async with TestRouter(mesh) as router:
        answers = await asyncio.gather(*(router.generate(tokens) for _ in range(6)))
        assert {tuple(a.tokens[0]) for a in answers} == {tuple(alone([tokens])[0])}
        assert mesh.services["prefill-0"].metric("kvmesh_prefill_tokens_total") == 20 * P


async def test_a_continuation_goes_on_where_another_worker_stopped(mesh: MiniMesh) -> None:
    tokens = prompt(30)
    seeded: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    }
    [right] = alone([tokens], **seeded)
    async with TestRouter(mesh) as router:
        answer = await router.generate([*tokens, *right[:10]], generated=10, sampling=seeded)
        assert answer.tokens[0] == right[10:]


async def test_logprobs_come_with_every_token_when_asked_for(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as router:
        answer = await router.generate(prompt(20), sampling={"logprobs": 3}, max_tokens=5)
        assert [len(p.top) for p in answer.logprobs[0]] == [3] * 5
        assert all(p.top[0].id == t for p, t in zip(answer.logprobs[0], answer.tokens[0], strict=True))
        assert all(p.logprob == p.top[0].logprob <= 0 for p in answer.logprobs[0])


async def test_cancelled_at_random_points_nothing_stays_leased(mesh: MiniMesh) -> None:
    dice = random.Random(4)
    async with TestRouter(mesh) as router:

        async def one(i: int) -> str:
            handoff = router.open(router.message(prompt(5 + 3 * i, i % 5), n=1 + i % 3, max_tokens=60))
            serving = asyncio.create_task(router.serve(handoff, prefill=dice.choice(["prefill-0", None])))
            if i % 2:
                await asyncio.sleep(dice.random() * 0.2)
                handoff.cancel()
            return (await serving).ending

        waves = [await asyncio.gather(*(one(i) for i in range(k, k + 20))) for k in (0, 20, 40)]
        endings = [e for wave in waves for e in wave]
        assert set(endings) <= {"FINISHED", "CANCELLED", "BUSY"}
        assert "CANCELLED" in endings
        await mesh.nothing_leased()
        assert mesh.services["decode-0"].metric("kvmesh_num_requests_running") == 0


async def test_one_choice_can_be_cancelled(script: MiniMesh) -> None:
    async with TestRouter(script) as router:
        handoff = router.open(router.message([65] * 40, n=3, max_tokens=30))
        handoff.on_row = lambda row: handoff.cancel(1) if row.choice == 1 else None
        answer = await router.serve(handoff, prefill=None)
        assert answer.ending == "FINISHED"
        assert sorted(answer.finish) == [0, 2]
        assert len(answer.tokens[1]) < 30 == len(answer.tokens[0])


async def test_a_broken_session_cancels_what_was_in_it(mesh: MiniMesh) -> None:
    async with TestRouter(mesh) as other:
        router = TestRouter(mesh)
        async with router:
            handoffs = [router.open(router.message(prompt(30 + i), max_tokens=2000)) for i in range(4)]
            tasks = [asyncio.create_task(router.serve(handoff)) for handoff in handoffs]
            async with asyncio.timeout(LIVENESS_S):
                await asyncio.gather(*(handoff.first_row.wait() for handoff in handoffs))
            await router.leave()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await mesh.nothing_leased()
        assert (await other.generate(prompt(20))).tokens[0] == alone([prompt(20)])[0]


async def test_with_a_pool_far_too_small_everything_finishes(directory: Path) -> None:
    prompts = [prompt(10 + 9 * i, 6) for i in range(8)]
    async with mini_mesh(directory, pages=14) as mesh, TestRouter(mesh) as router:
        answers = await asyncio.gather(*(router.generate(p, max_tokens=60) for p in prompts))
        assert {a.ending for a in answers} == {"FINISHED"}
        sampling = SamplingParams(temperature=0.0, seed=7)
        right = generate_batch(load("tiny:seed=1"), [Generation(p, sampling, 60) for p in prompts])
        assert [a.tokens[0] for a in answers] == right
        assert sum(a.preempted for a in answers) > 0
        await mesh.nothing_leased()


async def test_a_later_source_takes_over_and_an_older_one_is_ignored(mesh: MiniMesh) -> None:
    tokens = prompt(100)
    async with TestRouter(mesh) as router:
        handoff = router.open(router.message(tokens))
        await handoff.until("reserved")
        handoff.sources(1, "prefill-0")  # which never comes
        handoff.sources(3, None)
        handoff.sources(2, "prefill-0")
        answer = await handoff.finish()
        assert answer.tokens[0] == alone([tokens])[0]
        assert answer.computed_prompt_tokens == 100


async def test_a_failing_step_fails_its_request_alone(script: MiniMesh) -> None:
    async with TestRouter(script) as router:
        good = router.generate([66] * 50, prefill=None, max_tokens=50)
        bad = router.generate([67] * 50, prefill=None, max_tokens=50, metadata={"script_fail_at": "4"})
        answers = await asyncio.gather(good, bad, router.generate([68] * 50, prefill=None, max_tokens=50))
        assert [a.ending for a in answers] == ["FINISHED", "FAILED", "FINISHED"]
        assert [a.text for a in answers] == [b"B" * 50, b"C" * 3, b"D" * 50]
        assert answers[1].error.code == "step_failed"
        assert answers[1].error.http_status == 500
        await script.nothing_leased()


async def test_several_tokens_per_step_come_as_told(script: MiniMesh) -> None:
    async with TestRouter(script) as router:
        answer = await router.generate(list(b"abcdefg"), metadata={"script_split": "1,3,2"}, stop_ids=[257])
        steps = [bytes(t for t in tokens if t < 256) for _, tokens in answer.rows]
        assert steps == [b"a", b"bcd", b"ef", b"g", b""]
        assert answer.finish == {0: common_pb2.FINISH_REASON_STOP}
        split = await router.generate(list(b"abcdefg"), metadata={"script_split": "1,3,2"}, max_tokens=3)
        assert (split.text, split.finish) == (b"abc", {0: common_pb2.FINISH_REASON_LENGTH})


async def test_any_of_the_stop_ids_ends_a_choice_but_not_below_min_tokens(script: MiniMesh) -> None:
    async with TestRouter(script) as router:
        stopped = await router.generate(list(b"abcabc"), stop_ids=[257, ord("c")])
        assert (stopped.text, stopped.finish) == (b"abc", {0: common_pb2.FINISH_REASON_STOP})
        longer = await router.generate(list(b"ab"), stop_ids=[257], min_tokens=6, max_tokens=8)
        assert len(longer.tokens[0]) == 7
        assert longer.finish == {0: common_pb2.FINISH_REASON_STOP}
        assert 257 not in longer.tokens[0][:6]


async def test_without_credit_a_choice_waits(script: MiniMesh) -> None:
    async with TestRouter(script) as router:
        handoff = router.open(router.message(list(b"abcdef"), credit=2, max_tokens=6))
        await handoff.until("row")
        await handoff.until("row")
        # Another request comes and goes; the waiting one has not moved.
        assert (await router.generate(list(b"xyz"), max_tokens=3)).text == b"xyz"
        assert handoff.frames.empty()
        router.send(credit=decode_pb2.Credit(handoff_id=handoff.id, tokens=10))
        assert (await handoff.finish()).text == b"abcdef"


async def test_what_cannot_be_served_is_refused_with_the_reason(directory: Path) -> None:
    async with mini_mesh(directory, pages=16, prefill=0, max_seqs=2) as mesh, TestRouter(mesh) as router:

        async def refusal(message: decode_pb2.Open) -> tuple[str, str, str]:
            answer = await router.serve(router.open(message), prefill=None)
            return answer.ending, answer.error.code, answer.error.param

        good = router.message(prompt(20))
        foreign = router.message(prompt(20), capability=good.capability)
        assert await refusal(foreign) == ("INVALID", "permission_denied", "")
        unsigned = router.message(prompt(20), capability="")
        assert await refusal(unsigned) == ("INVALID", "invalid_mesh_token", "")
        assert (await refusal(router.message([300])))[::2] == ("INVALID", "prompt")
        assert (await refusal(router.message(prompt(20 * P))))[:2] == ("INVALID", "pool_too_small")
        assert (await refusal(router.message(prompt(4), n=3)))[::2] == ("INVALID", "n")
        wrong = router.message(prompt(40))
        wrong.prompt.segments[0].tokens.ids[0] ^= 1
        assert (await refusal(wrong))[::2] == ("INVALID", "block_ids")
        media = router.message(prompt(4))
        media.prompt.segments[0].media.mime_type = "image/png"
        assert (await refusal(media))[:2] == ("INVALID", "unsupported")
        waiting = [router.open(router.message(prompt(20, i), n=1)) for i in range(2)]
        for handoff in waiting:
            await handoff.until("reserved")
        assert (await refusal(router.message(prompt(4))))[0] == "BUSY"
        waiting[0].cancel()
        assert (await waiting[0].finish()).ending == "CANCELLED"
        held = router.open(router.message(prompt(10 * P)))
        await held.until("reserved")
        waiting[1].cancel()
        assert (await waiting[1].finish()).ending == "CANCELLED"
        assert (await refusal(router.message(prompt(10 * P, 9))))[0] == "NO_PAGES"
        held.cancel()
        await held.finish()
        await mesh.nothing_leased()


async def test_beats_come_only_while_there_is_work(script: MiniMesh) -> None:
    async with TestRouter(script) as router:
        await router.generate(list(b"abc"), metadata={"script_delay_ms": "300"}, max_tokens=3)
        assert router.beats
        assert router.beats[-1].running == 1
        assert router.beats[-1].steps >= 1
        # One may be under way; then it is quiet.
        await asyncio.sleep(0.6)
        count = len(router.beats)
        await asyncio.sleep(0.7)
        assert len(router.beats) == count


async def test_a_draining_worker_finishes_what_it_has_and_moves_the_rest(directory: Path) -> None:
    async with mini_mesh(directory, "script:", prefill=0, drain_s=0.5) as mesh, TestRouter(mesh) as router:
        slow = router.open(
            router.message([65] * 40, max_tokens=5000, metadata={"script_delay_ms": "20"}, credit=0)
        )
        await slow.until("reserved")
        slow.sources(1, None)
        await slow.until("row")
        quick = router.open(router.message(list(b"abc"), max_tokens=3))
        await quick.until("row")
        service = mesh.services["decode-0"]
        service.runtime.stopping.set()
        assert (await quick.finish()).ending == "FINISHED"
        late = await router.serve(router.open(router.message(list(b"abc"))))
        assert late.ending == "DRAINING"
        moved = await slow.finish()
        assert moved.ending == "MOVED"
        assert moved.tokens[0]
        await asyncio.wait_for(service.task, LIVENESS_S)
        await mesh.nothing_leased()


async def test_generation_goes_on_while_the_store_is_away(directory: Path) -> None:
    async with mini_mesh(directory) as mesh, TestRouter(mesh) as router:
        tokens = prompt(40)
        handoff = router.open(router.message(tokens, max_tokens=200))
        serving = asyncio.create_task(router.serve(handoff))
        await asyncio.wait_for(handoff.first_row.wait(), LIVENESS_S)
        await mesh.services.pop("kvstore-0").stop()
        await mesh.start("kvstore", "kvstore-0")
        answer = await serving
        sampling = SamplingParams(temperature=0.0, seed=7)
        [right] = generate_batch(load("tiny:seed=1"), [Generation(tokens, sampling, 200)])
        assert answer.tokens[0] == right
        await mesh.nothing_leased()
