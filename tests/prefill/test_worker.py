"""The prefill worker over its real seams: `Run`, the store's sockets, a decode worker that reserved."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from kvmesh.v1 import decode_pb2, prefill_pb2

from mesh.errors import MeshError, from_rpc_error
from tests.decode.mini_mesh import LIVENESS_S, Handoff, MiniMesh, P, TestRouter, mini_mesh

Run = grpc.aio.UnaryStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        yield Path(name)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[MiniMesh]:
    async with mini_mesh(directory, prefill=2) as mesh:
        yield mesh


@pytest.fixture
async def router(mesh: MiniMesh) -> AsyncIterator[TestRouter]:
    async with TestRouter(mesh) as router:
        yield router


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed} {length}").choices(range(256), k=length)


async def reserved(router: TestRouter, length: int, seed: int = 0, max_tokens: int = 4) -> Handoff:
    handoff = router.open(router.message(prompt(length, seed), max_tokens=max_tokens))
    await handoff.until("reserved")
    return handoff


async def ending(call: Run) -> MeshError:
    """The error that a run ends with."""
    try:
        async with asyncio.timeout(LIVENESS_S):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the run ended well")


async def committed(call: Run, blocks: int) -> None:
    """Reads progress until so many blocks are there."""
    async with asyncio.timeout(LIVENESS_S):
        async for response in call:
            if response.committed_blocks >= blocks:
                return


async def test_progress_ends_with_every_block_and_says_the_wait_once(
    mesh: MiniMesh, router: TestRouter
) -> None:
    handoff = await reserved(router, 40 * P + 1)
    handoff.sources(1, "prefill-0")
    call = router.run(handoff.open)
    seen = []
    async with asyncio.timeout(LIVENESS_S):
        async for response in call:
            seen.append(response)
            if response.committed_blocks == 40:
                break
    assert [r.HasField("queue_s") for r in seen] == [True] + [False] * (len(seen) - 1)
    assert [r.committed_blocks for r in seen] == sorted({r.committed_blocks for r in seen})
    assert seen[-1].computed_tokens == 40 * P
    await handoff.until("ready")
    call.cancel()
    assert (await handoff.finish()).ending == "FINISHED"
    await mesh.nothing_leased()


async def test_the_leases_of_a_run_live_as_long_as_the_call(mesh: MiniMesh, router: TestRouter) -> None:
    handoff = await reserved(router, 6 * P + 1)
    call = router.run(handoff.open)
    await committed(call, 6)
    handoff.cancel()
    await handoff.finish()
    assert (await mesh.stats()).leased == 6
    call.cancel()
    await mesh.nothing_leased()


async def test_equal_prompts_share_the_work_of_their_common_blocks(
    mesh: MiniMesh, router: TestRouter
) -> None:
    await router.generate(prompt(10 * P + 3))
    longer = [*prompt(10 * P + 3)[: 8 * P], *prompt(4 * P, 1)]
    answer = await router.generate(longer)
    assert answer.have == 8
    assert mesh.services["prefill-0"].metric("kvmesh_prefill_tokens_total") == (10 + 3) * P


async def test_an_older_attempt_is_refused(router: TestRouter) -> None:
    # Long enough that the reservation outlives what is asked here.
    handoff = await reserved(router, 3 * P, max_tokens=500)
    handoff.sources(5, "prefill-0")
    newer = router.run(handoff.open, attempt=5)
    await committed(newer, 1)
    assert (await ending(router.run(handoff.open, attempt=4))).code == "stale_attempt"
    elsewhere = router.run(handoff.open, attempt=4, worker="prefill-1")
    assert (await ending(elsewhere)).code == "stale_attempt"
    newer.cancel()
    assert (await handoff.finish()).ending == "FINISHED"


async def test_a_later_attempt_on_the_same_worker_replaces_the_earlier_one(
    mesh: MiniMesh, router: TestRouter
) -> None:
    handoff = await reserved(router, 60 * P)
    handoff.sources(1, "prefill-0")
    first = router.run(handoff.open, attempt=1)
    await committed(first, 1)
    handoff.sources(2, "prefill-0")
    second = router.run(handoff.open, attempt=2)
    await handoff.until("ready")
    assert (await ending(first)).code == "stale_attempt"
    second.cancel()
    assert (await handoff.finish()).ending == "FINISHED"
    await mesh.nothing_leased()


async def test_what_the_run_is_not_allowed_to_do(router: TestRouter) -> None:
    handoff = await reserved(router, 3 * P)
    unknown = router.message(prompt(3 * P, 3))
    assert (await ending(router.run(unknown))).code == "reservation_lost"
    other = decode_pb2.Open()
    other.CopyFrom(handoff.open)
    other.capability = unknown.capability
    assert (await ending(router.run(other))).code == "permission_denied"
    other.CopyFrom(handoff.open)
    other.prompt.segments[0].tokens.ids[0] ^= 1
    assert (await ending(router.run(other))).param == "block_ids"
    handoff.cancel()
    await handoff.finish()


async def test_runs_cancelled_at_random_points_leave_nothing(mesh: MiniMesh, router: TestRouter) -> None:
    dice = random.Random(1)

    async def one(i: int) -> None:
        handoff = await reserved(router, 200 + i, i % 3)
        call = router.run(handoff.open, worker=f"prefill-{i % 2}")
        try:
            async with asyncio.timeout(dice.random() * 0.1):
                async for _ in call:
                    pass
        except (TimeoutError, asyncio.CancelledError):
            pass
        except grpc.aio.AioRpcError as error:
            # Another run may have committed all of it, so that the request ended before this run began.
            if from_rpc_error(error).code != "reservation_lost":
                raise
        if dice.random() < 0.5:
            handoff.cancel()
            call.cancel()
        else:
            call.cancel()
            handoff.sources(2, None)
        assert (await handoff.finish()).ending in ("FINISHED", "CANCELLED")

    await asyncio.gather(*(one(i) for i in range(8)))
    await asyncio.gather(*(one(i) for i in range(8)))
    await mesh.nothing_leased()
