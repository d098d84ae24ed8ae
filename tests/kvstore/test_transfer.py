"""Pages between the stores of two nodes: waited for, checked, fenced, and never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kvmesh.v1 import pages_pb2

from kvstore.imports import Arrival, Fetching, Import
from kvstore.seals import seal
from mesh.errors import (
    Conflict,
    InternalError,
    MeshError,
    NotFound,
    StaleAttempt,
    Unavailable,
)
from mesh.kv.client import KvClient
from mesh.kv.layout import Dtype, Layout, Plane, PlaneKind, layout_to_proto
from mesh.kv.split import heads
from tests.kvstore.node import (
    FINGERPRINT,
    LAYOUT,
    MODEL,
    Node,
    complete,
    compute,
    eventually,
    holds,
    items,
    prompt,
    two_nodes,
    write,
)


async def _fetch(there: Node, here: Node, kv: KvClient, handoff: str, attempt: int, n: int = 4) -> int:
    root, ids = prompt(n)
    return await kv.fetch(handoff, attempt, here.capability(handoff, ids), root, there.address)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("way", [{"tcp": True}, {}, {"grpc_only": True}])
async def test_pages_arrive_while_they_are_computed(way: dict[str, bool], compress: bool) -> None:
    root, ids = prompt(4)
    async with two_nodes(compress=compress, **way) as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        await decode.reserve("h", b.capability("h", ids), ids, root, 1)
        fetching = asyncio.create_task(_fetch(a, b, decode, "h", 1))
        arrived = aiter(decode.committed("h"))
        await asyncio.sleep(0.02)  # The other node does not know of the handoff yet.
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        drawn = await prefill.draw("h", 1, a.capability("h", ids))
        for index, page in drawn.writable:
            write(prefill, page, ids[index])
            await prefill.commit("h", items(root, ids, [(index, page)]), 1)
            [(at, got)] = await asyncio.wait_for(anext(arrived), 5)
            assert at == index
            assert holds(decode, got, ids[index])
        assert await fetching == 4
        await prefill.release("h")
        await decode.release("h")
        assert a.counts() == {"free": 28, "cached": 4}
        assert b.counts()["cached"] == 4
        await prefill.close()
        await decode.close()
        for node in (a, b):
            await node.stats()


async def test_what_is_here_is_not_sent_and_what_is_cached_there_is() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        for node, kv in ((a, prefill), (b, decode)):
            blocks = ids if node is a else ids[:2]
            await kv.reserve("old", node.capability("old", blocks), blocks, root, 0)
            await compute(node, kv, "old", root, list(blocks))
            await kv.release("old")
        assert (await decode.reserve("h", b.capability("h", ids), ids, root, 0)).missing == 2
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        assert await _fetch(a, b, decode, "h", 1) == 2
        assert sorted(await complete(decode, "h")) == [2, 3]


async def test_only_blocks_of_the_handoff_that_the_capability_names_leave() -> None:
    root, ids = prompt(4)
    other_root, others = prompt(4, seed=1)
    async with two_nodes() as (a, _):
        prefill = await a.worker("prefill-0", "prefill")
        for name, r, blocks in (("h", root, ids), ("other", other_root, others)):
            await prefill.reserve(name, a.capability(name, blocks), blocks, r, 0, attempt=1)
            await compute(a, prefill, name, r, blocks, 1)
        stub = a.stub("kvstore", "kvstore-0")

        async def pull(**changes: Any) -> list[pages_pb2.PullResponse]:
            known: dict[str, Any] = {
                "capability": a.capability("h", ids), "layout": layout_to_proto(LAYOUT), "block_ids": ids,
                "handoff_id": "h", "model": MODEL, "content_fingerprint": FINGERPRINT,
            }  # fmt: skip
            return [part async for part in stub.Pull(pages_pb2.PullRequest(**{**known, **changes}))]

        assert len(await pull()) == 4
        for wrong, code in (
            ({"block_ids": [*ids[:3], others[3]]}, "PERMISSION_DENIED"),
            ({"handoff_id": "other", "block_ids": others}, "PERMISSION_DENIED"),
            ({"capability": a.capability("h", ids, org="evil")}, "PERMISSION_DENIED"),
            ({"capability": a.capability("h", ids, minted_by="decode")}, "UNAUTHENTICATED"),
            ({"capability": a.capability("nobody", ids), "handoff_id": "nobody"}, "NOT_FOUND"),
        ):
            with pytest.raises(Exception) as refused:
                await pull(**wrong)
            assert refused.value.code().name == code, wrong  # type: ignore[attr-defined]
        with pytest.raises(Exception) as refused:
            async for _ in a.stub("decode").Pull(pages_pb2.PullRequest()):
                pass
        assert refused.value.code().name == "PERMISSION_DENIED"  # type: ignore[attr-defined]


async def test_other_content_or_layout_is_refused_with_both_named() -> None:
    root, ids = prompt(4)
    narrow = Layout(16, 1024, (Plane(0, 0, PlaneKind.K, 1, 16, Dtype.F16, 0),))
    async with two_nodes() as (a, b):
        await a.worker("prefill-0", "prefill")
        for name, changes, told in (
            ("decode-0", {"layout": narrow}, (str(LAYOUT), str(narrow))),
            ("decode-1", {"fingerprint": b"g" * 16}, (FINGERPRINT.hex(), (b"g" * 16).hex())),
        ):
            decode = await b.worker(name, **changes)
            await decode.reserve(name, b.capability(name, ids), ids, root, 0)
            with pytest.raises(Conflict) as refused:
                await _fetch(a, b, decode, name, 1)
            assert refused.value.code == "foreign_pages"
            assert all(value in refused.value.message for value in told)


async def test_the_end_of_the_run_there_ends_the_fetch_here() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        fetching = asyncio.create_task(_fetch(a, b, decode, "h", 1))
        await eventually(lambda: b.counts().get("granted", 0) >= 4, "nothing was drawn")
        await asyncio.sleep(0.05)
        await prefill.release("h")
        with pytest.raises(NotFound):
            await asyncio.wait_for(fetching, 5)
        # Nothing is lost: a later attempt computes here.
        assert len(await compute(b, decode, "h", root, ids, 2)) == 4


async def test_a_later_attempt_takes_the_blocks_from_a_fetch() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        decode = await b.worker("decode-0")
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        fetching = asyncio.create_task(_fetch(a, b, decode, "h", 1))
        await eventually(lambda: len(next(iter(b.store.arenas.values())).pool.owners) > 1, "not begun")
        # `a` does not know the model until its worker comes.
        assert isinstance(await _outcome(fetching, 0.2), (NotFound, TimeoutError))
        await a.worker("prefill-0", "prefill")
        fetching = asyncio.create_task(_fetch(a, b, decode, "h", 2))
        await asyncio.sleep(0.05)
        assert len(await compute(b, decode, "h", root, ids, 3)) == 4
        with pytest.raises(StaleAttempt):
            await asyncio.wait_for(fetching, 5)
        await decode.release("h")
        assert b.counts()["cached"] == 4
        await eventually(lambda: "quarantined" not in b.counts(), "a fenced page stays")


async def _outcome(task: asyncio.Task[int], within_s: float) -> BaseException | None:
    try:
        await asyncio.wait_for(task, within_s)
    except (MeshError, TimeoutError) as error:
        return error
    return None


async def test_releasing_the_reservation_stops_the_transfer() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        fetching = asyncio.create_task(_fetch(a, b, decode, "h", 1))
        await asyncio.sleep(0.05)
        await decode.release("h")
        with pytest.raises(NotFound):
            await asyncio.wait_for(fetching, 5)
        await eventually(lambda: b.counts().get("granted", 0) + b.counts()["free"] == 32, "pages were lost")
        (arena,) = a.store.arenas.values()
        await eventually(lambda: len(arena.pool.owners) == 1, "the other store still sends")


async def test_a_page_that_is_not_what_was_committed_never_arrives() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        winners = await compute(a, prefill, "h", root, ids, 1)
        prefill.arena[winners[2].index * prefill.page_bytes + 77] ^= 1
        with pytest.raises(InternalError) as refused:
            await _fetch(a, b, decode, "h", 1)
        assert refused.value.code == "corrupt_page"
        (arena,) = b.store.arenas.values()
        assert ids[2] not in arena.pool.table.index


class _BreakingSource:
    """Delivers one page a stream, then breaks."""

    def __init__(self, pages: dict[bytes, Arrival], data: dict[bytes, bytes]) -> None:
        self._pages, self._data = pages, data
        self.streams = 0

    async def pull(self, handoff_id: str, places: dict[bytes, memoryview]) -> AsyncIterator[list[Arrival]]:
        self.streams += 1
        block_id, place = next(iter(places.items()))
        # Half of another one is there already when the stream breaks.
        list(places.values())[-1][: len(place) // 2] = b"\1" * (len(place) // 2)
        place[:] = self._data[block_id]
        yield [self._pages[block_id]]
        raise Unavailable("the stream broke")


async def test_a_broken_stream_goes_on_with_what_is_missing() -> None:
    root, ids = prompt(6)
    async with two_nodes() as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        await compute(a, prefill, "h", root, ids, 1)
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        (there,), (here,) = a.store.arenas.values(), b.store.arenas.values()
        records = {i: there.pool.table.find(i) for i in ids}
        source = _BreakingSource(
            {i: Arrival(i, seal(i, r.parent_id, r.checksum), r.checksum) for i, r in records.items() if r},
            {i: bytes(there.files.page(r.index)) for i, r in records.items() if r},
        )
        work = Import(here, Fetching("h", "acme", 1, root), source, b.store.settle)
        await asyncio.wait_for(work.run(), 10)
        got = await complete(decode, "h")
        assert work.pulled == 6
        assert source.streams == 6
        assert all(holds(decode, page, ids[i]) for i, page in got.items())


async def test_a_later_attempt_of_another_worker_replaces_a_reservation() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, _):
        hung, other = await a.worker("prefill-0", "prefill"), await a.worker("prefill-1", "prefill")
        await hung.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        drawn = await hung.draw("h", 1, a.capability("h", ids))
        with pytest.raises(Conflict):
            await other.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        await other.reserve("h", a.capability("h", ids), ids, root, 0, attempt=2)
        assert len(await compute(a, other, "h", root, ids, 2)) == 4
        with pytest.raises(StaleAttempt):
            await hung.commit("h", items(root, ids, drawn.writable[:1]), 1)
        await other.release("h")
        await hung.release("h")
        await a.stats()
        assert a.counts()["cached"] == 4


SPLIT = Layout(
    16,
    4096,
    tuple(
        Plane(0, layer, kind, 4, 8, Dtype.F16, 1024 * (2 * layer + n))
        for layer in range(2)
        for n, kind in enumerate((PlaneKind.K, PlaneKind.V))
    ),
)


@pytest.mark.parametrize("way", [{}, {"grpc_only": True}])
async def test_each_half_of_the_heads_is_sent_alone(way: dict[str, bool]) -> None:
    """Prefill has whole pages, two decode workers half of the heads each: each gets its own bytes."""
    root, ids = prompt(4)
    async with two_nodes(**way) as (a, b):
        prefill = await a.worker("prefill-0", "prefill", layout=SPLIT)
        assert prefill.page_bytes == 4096
        for rank in range(2):
            handoff = f"h/{rank}"
            part = heads(SPLIT, 2 * rank, 2, 4)
            decode = await b.worker(f"decode-{rank}", layout=part)
            assert decode.page_bytes == 2048
            await decode.reserve(handoff, b.capability(handoff, ids), ids, root, 0)
            await prefill.reserve(handoff, a.capability(handoff, ids), ids, root, 0, attempt=1)
            drawn = await prefill.draw(handoff, 1, a.capability(handoff, ids))
            for index, page in drawn.writable:
                # Each head of each plane is full of its number.
                for piece in range(16):
                    start = page.index * 4096 + piece * 256
                    prefill.arena[start : start + 256] = bytes([index * 16 + piece]) * 256
            if drawn.writable:
                await prefill.commit(handoff, items(root, ids, drawn.writable), 1)
            assert await _fetch(a, b, decode, handoff, 1) == 4
            for index, page in (await complete(decode, handoff)).items():
                got = bytes(decode.arena[page.index * 2048 : (page.index + 1) * 2048])
                wanted = [plane * 4 + 2 * rank + head for plane in range(4) for head in range(2)]
                assert got == b"".join(bytes([index * 16 + piece]) * 256 for piece in wanted)


async def test_a_part_that_the_other_node_lacks_is_refused_by_name() -> None:
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        prefill = await a.worker("prefill-0", "prefill", layout=heads(SPLIT, 0, 2, 4))
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        for name, layout in (("decode-0", SPLIT), ("decode-1", heads(SPLIT, 2, 2, 4))):
            decode = await b.worker(name, layout=layout)
            await decode.reserve(name, b.capability(name, ids), ids, root, 0)
            with pytest.raises(Conflict, match="needs heads") as refused:
                await _fetch(a, b, decode, name, 1)
            assert refused.value.code == "foreign_pages"


async def test_a_part_of_a_damaged_page_is_not_sent() -> None:
    """The part's own seal would be right."""
    root, ids = prompt(4)
    async with two_nodes() as (a, b):
        prefill = await a.worker("prefill-0", "prefill", layout=SPLIT)
        decode = await b.worker("decode-0", layout=heads(SPLIT, 0, 2, 4))
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        winners = await compute(a, prefill, "h", root, ids, 1)
        # In a head that the part does not even have.
        prefill.arena[winners[2].index * prefill.page_bytes + 4000] ^= 1
        with pytest.raises(InternalError) as refused:
            await _fetch(a, b, decode, "h", 1)
        assert refused.value.code == "corrupt_page"
