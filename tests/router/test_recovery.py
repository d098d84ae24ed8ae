"""Workers that die, hang, refuse or preempt: one answer, the right one, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from kvmesh.v1 import decode_pb2

from tests.router.fakes import END, P, echo, endless, text_script
from tests.router.world import World, events, member, until, world

TEXT = "the quick brown fox jumps over the lazy dog, twice or more often"


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(decode=2, prefill=2, hang_s=0.3) as made:
        for worker in made.decode:
            worker.fake.behaviour.step_s = 0.001
        yield made


async def settled(mesh: World) -> None:
    """No sequence is counted anywhere."""
    placement = mesh.router.fleet.placement
    workers = placement.workers("decode") + placement.workers("prefill")
    await until(lambda: not any(worker.ours for worker in workers))
    await until(lambda: not any(fake.open_runs for fake in mesh.prefill))


@pytest.mark.parametrize("incident", ["die", "hang", "preempt", "move"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_outlives_its_worker(mesh: World, incident: str, stream: bool) -> None:
    for worker in mesh.decode:
        worker.fake.behaviour.script = text_script(TEXT)
    first = mesh.decode[0].fake
    # Whoever gets the request has the incident; the other one has none.
    first.behaviour.incident = mesh.decode[1].fake.behaviour.incident = incident
    first.behaviour.incident_after = mesh.decode[1].fake.behaviour.incident_after = 5
    asking = asyncio.ensure_future(mesh.complete("x" * 40, max_tokens=500, stream=stream))
    await until(lambda: any(w.fake.opened for w in mesh.decode))
    victim = next(w.fake for w in mesh.decode if w.fake.opened)
    other = next(w.fake for w in mesh.decode if w.fake is not victim)
    other.behaviour.incident = ""
    answer = await asking
    assert answer.status_code == 200
    if stream:
        chunks = events(answer.text)
        assert chunks[-1] == "[DONE]"
        text = "".join(c["text"] for chunk in chunks[:-1] for c in chunk["choices"])
    else:
        text = answer.json()["choices"][0]["text"]
        assert answer.json()["usage"]["completion_tokens"] == len(TEXT) + 1
    assert text == TEXT
    opened = [*victim.opened, *other.opened]
    assert len(opened) == 2
    again = max(opened, key=lambda open_: open_.attempt)
    before = min(opened, key=lambda open_: open_.attempt)
    assert again.generated >= 5
    assert len(again.prompt.segments[0].tokens.ids) == 40 + again.generated
    assert again.arrival_unix_ns == before.arrival_unix_ns
    assert again.sampling.seed == before.sampling.seed
    assert again.handoff_id != before.handoff_id
    assert mesh.suspects == (
        ["decode-tiny-0" if victim is first else "decode-tiny-1"] if incident == "hang" else []
    )
    await settled(mesh)


async def test_choices_that_have_begun_continue_one_by_one(mesh: World) -> None:
    for worker in mesh.decode:
        worker.fake.behaviour.script = lambda prompt, choice: [*f"choice {choice} says so".encode(), END]
        worker.fake.behaviour.incident, worker.fake.behaviour.incident_after = "preempt", 4
    answer = await mesh.complete("ab", n=3, max_tokens=100)
    assert [c["text"] for c in answer.json()["choices"]] == [f"choice {i} says so" for i in range(3)]
    opened = [open_ for worker in mesh.decode for open_ in worker.fake.opened]
    again = [open_ for open_ in opened if open_.generated]
    assert all(open_.n == 1 for open_ in again)
    assert {open_.first_choice for open_ in again} == {0, 1, 2}
    await settled(mesh)


async def test_the_loss_of_a_worker_with_many_choices_of_a_request_is_one_loss() -> None:
    async with world(decode=1, prefill=0) as mesh:
        behaviour = mesh.worker.behaviour
        behaviour.script = lambda prompt, choice: [*f"choice {choice} says so at some length".encode(), END]
        behaviour.step_s = 0.02
        behaviour.incident, behaviour.incident_after = "die", 4

        def opened(most: int) -> bool:
            return len(mesh.worker.opened) >= most

        asking = asyncio.ensure_future(mesh.complete("ab", n=8, max_tokens=100))
        # Since then each choice is a placement of its own; now they are lost together, twice.
        for again in (1 + 8, 1 + 16):
            await until(partial(opened, again))
            behaviour.incident = "die"
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert [c["text"] for c in answer.json()["choices"]] == [
            f"choice {i} says so at some length" for i in range(8)
        ]
        await settled(mesh)


async def test_a_request_that_kills_every_worker_ends_in_one_error() -> None:
    async with world(decode=1, prefill=0) as mesh:
        fake = mesh.worker
        fake.behaviour.script = endless

        async def kill_again() -> None:
            while True:
                fake.behaviour.incident = "die"
                await asyncio.sleep(0.01)

        killer = asyncio.ensure_future(kill_again())
        answer = await mesh.complete("x", max_tokens=1000)
        streamed = await mesh.complete("x", max_tokens=1000, stream=True)
        killer.cancel()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "worker_lost"
        assert events(streamed.text)[-1]["error"]["code"] == "worker_lost"
        assert "[DONE]" not in streamed.text
        assert len(fake.opened) == 8
        fake.behaviour.incident, fake.behaviour.script = "", echo
        assert (await mesh.complete("after")).status_code == 200


@pytest.mark.parametrize("fault", ["", "die", "stall"])
async def test_blocks_come_from_prefill_or_from_the_decode_worker_itself(fault: str) -> None:
    async with world(decode=1, prefill=1, prefill_stalled_s=0.2) as mesh:
        runs = mesh.router.core.floor.run_patience
        object.__setattr__(runs, "health_every_s", 0.1)
        mesh.worker.behaviour.have = lambda open_: 1
        mesh.prefill[0].fault = fault
        answer = await mesh.complete([97] * 100, max_tokens=4)
        assert answer.json()["choices"][0]["text"] == "aaaa"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == P
        (run,) = mesh.prefill[0].runs
        assert getattr(run, "from") == 1
        assert len(run.block_ids) == 6
        assert len(run.prompt.segments[0].tokens.ids) == 6 * P
        sources = [(s.attempt, s.WhichOneof("from")) for s in mesh.worker.sources]
        if fault:
            assert sources == [(1, "prefill_worker"), (2, "self")]
            assert mesh.suspects == (["prefill-tiny-0"] if fault == "stall" else [])
        else:
            assert sources == [(1, "prefill_worker")]
        await settled(mesh)


@pytest.mark.parametrize("alone", ["at once", "later"])
async def test_a_decode_worker_whose_store_is_away_needs_no_sources(alone: str) -> None:
    async with world(decode=1, prefill=1) as mesh:
        mesh.worker.behaviour.have = lambda open_: 1
        mesh.worker.behaviour.alone = alone
        mesh.prefill[0].fault = "stall"
        answer = await mesh.complete([97] * 100, max_tokens=4)
        assert answer.json()["choices"][0]["text"] == "aaaa"
        assert len(mesh.prefill[0].runs) == (alone == "later")
        assert not mesh.suspects
        await settled(mesh)


async def test_short_prompts_and_full_hits_call_no_prefill_worker(mesh: World) -> None:
    for length in (1, 16, 17, 100):
        assert (await mesh.complete([97] * length, max_tokens=2)).status_code == 200
    assert not any(fake.runs for fake in mesh.prefill)


async def test_refused_requests_queue_and_go_on_when_there_is_room() -> None:
    async with world(decode=1, prefill=0) as mesh:
        mesh.worker.behaviour.step_s = 0.005
        mesh.worker.behaviour.refuse = [
            decode_pb2.REFUSE_REASON_NO_PAGES,
            decode_pb2.REFUSE_REASON_BUSY,
            decode_pb2.REFUSE_REASON_NO_STORE,
        ]
        answers = await asyncio.gather(*[mesh.complete(f"{i} hello") for i in range(8)])
        assert [a.json()["choices"][0]["text"] for a in answers] == [f"{i} hello" for i in range(8)]
        assert len(mesh.worker.opened) == 11
        await settled(mesh)


async def test_a_full_queue_refuses_honestly() -> None:
    async with world(decode=1, prefill=0, queue_limit=1, queue_s=0.3) as mesh:
        placed = mesh.router.fleet.placement.get("decode-tiny-0")
        assert placed is not None
        placed.capacity = 1
        mesh.worker.behaviour.script = endless
        mesh.worker.behaviour.step_s = 0.01
        running = asyncio.ensure_future(mesh.complete("x", max_tokens=80))
        await until(lambda: placed.ours)
        waiting = asyncio.ensure_future(mesh.complete("y", max_tokens=1))
        await until(lambda: mesh.router.fleet.admission.waiting("tiny"))
        refused = await mesh.complete("z")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await waiting).status_code == 503
        assert (await running).status_code == 200


async def test_a_draining_worker_gets_nothing_new(mesh: World) -> None:
    mesh.decode[0].fake.behaviour.refuse = [decode_pb2.REFUSE_REASON_DRAINING] * 2
    mesh.decode[1].fake.behaviour.refuse = []
    answers = [await mesh.complete("x") for _ in range(4)]
    assert all(answer.status_code == 200 for answer in answers)
    assert len(mesh.decode[0].fake.opened) == 1


async def test_without_workers_a_request_waits_a_while_then_ends() -> None:
    async with world(decode=1, prefill=0, no_worker_s=0.3) as mesh:
        name = mesh.decode[0].member.name
        gone = mesh.members.pop(name)
        mesh.tell_members()
        refused = await mesh.complete("x")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_worker"
        assert refused.headers["retry-after"]
        mesh.router.fleet.admission._gone_at.clear()
        waiting = asyncio.ensure_future(mesh.complete("x"))
        await until(lambda: mesh.router.fleet.admission.waiting("tiny"))
        mesh.members[name] = member(name, "decode", gone.address)
        mesh.tell_members()
        assert (await waiting).status_code == 200


async def test_load_spreads_over_the_workers(mesh: World) -> None:
    for worker in mesh.decode:
        worker.fake.behaviour.have = lambda open_: 0
    answers = await asyncio.gather(*[mesh.complete([97] * 20, max_tokens=3) for _ in range(16)])
    assert all(answer.status_code == 200 for answer in answers)
    assert [len(worker.fake.opened) for worker in mesh.decode] == [8, 8]
    assert sum(len(fake.runs) for fake in mesh.prefill) == 16
    assert all(fake.runs for fake in mesh.prefill)
    await settled(mesh)
