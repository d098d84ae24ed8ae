"""The store over a real Unix socket, asked by real clients."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from kvmesh.v1 import common_pb2, pages_pb2

from mesh.errors import (
    InvalidRequest,
    MeshError,
    OutOfPages,
    PermissionDenied,
    StaleAttempt,
    StaleHandle,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from mesh.kv.layout import layout_to_proto
from mesh.kv.page import CommitItem, Page
from tests.kvstore.node import (
    FINGERPRINT,
    LAYOUT,
    MODEL,
    Node,
    complete,
    compute,
    holds,
    items,
    prompt,
    write,
)


async def test_a_hand_over_leases_what_prefill_commits(node: Node) -> None:
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    root, ids = prompt(5)
    reserved = await decode.reserve("r/0", node.capability("r/0", ids), ids, root, 2)
    assert (reserved.have, reserved.missing, len(reserved.extra)) == ([], 5, 2)
    assert node.counts() == {"free": 25, "granted": 7}

    winners = await compute(node, prefill, "r/0", root, ids)
    got = await complete(decode, "r/0")
    assert [got[i] for i in range(5)] == winners
    assert all(holds(decode, got[i], ids[i]) for i in range(5)), "the same memory, no copy"
    assert node.counts() == {"free": 25, "granted": 2, "leased": 5}

    await prefill.release("r/0")
    assert node.counts()["leased"] == 5, "decode still reads them"
    await decode.release("r/0")
    decode.give(reserved.extra)
    assert node.counts() == {"free": 25, "granted": 2, "cached": 5}

    again = await decode.reserve("r/1", node.capability("r/1", ids), ids, root, 0)
    assert (again.have, again.missing) == (winners, 0)
    assert await complete(decode, "r/1") == {}


async def test_news_that_come_before_anybody_asks_are_kept(node: Node) -> None:
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    root, ids = prompt(3)
    await decode.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    drawn = await prefill.draw("r/0", 1, node.capability("r/0", ids))
    await prefill.commit("r/0", items(root, ids, drawn.writable), 1)
    await decode.grow(1)
    assert sorted(await complete(decode, "r/0")) == [0, 1, 2]


async def test_equal_prompts_at_once_end_on_the_same_pages(node: Node) -> None:
    root, ids = prompt(4)
    decodes = [await node.worker(f"d{i}") for i in range(2)]
    prefills = [await node.worker(f"p{i}", "prefill") for i in range(2)]
    for i, kv in enumerate(decodes):
        await kv.reserve(f"r{i}/0", node.capability(f"r{i}/0", ids), ids, root, 0)
    drawn = [await kv.draw(f"r{i}/0", 0, node.capability(f"r{i}/0", ids)) for i, kv in enumerate(prefills)]
    first, second = (items(root, ids, d.writable) for d in drawn)
    assert {p.index for _, p in drawn[0].writable}.isdisjoint(p.index for _, p in drawn[1].writable)

    half = await prefills[0].commit("r0/0", first[:2])
    winners = await prefills[1].commit("r1/0", second)
    rest = await prefills[0].commit("r0/0", first[2:])
    assert winners == [*half, *rest]
    assert [i.page for i in first[:2]] == half
    assert [i.page for i in second[2:]] == winners[2:]
    for i, kv in enumerate(decodes):
        assert [page for _, page in sorted((await complete(kv, f"r{i}/0")).items())] == winners

    prefills[1].give([i.page for i in second[:2]])
    prefills[0].give([i.page for i in first[2:]])
    for i in range(2):
        await prefills[i].release(f"r{i}/0")
        await decodes[i].release(f"r{i}/0")
        await prefills[i].close()
        await decodes[i].close()
    assert node.counts() == {"free": 28, "cached": 4}


async def test_a_reservation_gets_a_block_that_somebody_else_commits(node: Node) -> None:
    waiting, busy = await node.worker("d0"), await node.worker("d1")
    root, ids = prompt(2)
    await waiting.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    assert await busy.grow(2)
    pages = busy.take(2)
    assert pages is not None
    await busy.commit("growth", items(root, ids, list(enumerate(pages))))
    assert await complete(waiting, "r/0") == dict(enumerate(pages))
    assert node.counts()["leased"] == 2


async def test_a_higher_attempt_fences_an_earlier_drawer(node: Node) -> None:
    decode = await node.worker("d0")
    slow, fresh = await node.worker("p0", "prefill"), await node.worker("p1", "prefill")
    root, ids = prompt(3)
    capability = node.capability("r/0", ids)
    await decode.reserve("r/0", capability, ids, root, 0)
    old = await slow.draw("r/0", 1, capability)
    (kept,) = await slow.commit("r/0", items(root, ids, old.writable[:1]), 1)
    with pytest.raises(StaleAttempt):
        await fresh.draw("r/0", 1, capability)
    new = await fresh.draw("r/0", 2, capability)
    assert new.committed == [(0, kept)]
    assert [i for i, _ in new.writable] == [1, 2]
    assert {p.index for _, p in new.writable}.isdisjoint(p.index for _, p in old.writable)
    assert node.counts()["quarantined"] == 2

    with pytest.raises(StaleAttempt):
        await slow.commit("r/0", items(root, ids, old.writable[1:]), 1)
    with pytest.raises(StaleAttempt):
        await slow.draw("r/0", 1, capability)
    await fresh.commit("r/0", items(root, ids, new.writable), 2)
    assert sorted(await complete(decode, "r/0")) == [0, 1, 2]
    await slow.release("r/0")
    assert "quarantined" not in node.counts(), "the earlier drawer writes no more"


async def test_decode_computes_the_prompt_itself(node: Node) -> None:
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    root, ids = prompt(3)
    capability = node.capability("r/0", ids)
    await decode.reserve("r/0", capability, ids, root, 0)
    await prefill.draw("r/0", 1, capability)
    mine = await compute(node, decode, "r/0", root, ids, attempt=2)
    assert len(mine) == 3
    assert await complete(decode, "r/0") == {}
    await decode.release("r/0")
    await prefill.release("r/0")
    assert node.counts() == {"free": 29, "cached": 3}


async def test_out_of_pages_is_all_or_nothing(node: Node) -> None:
    decode = await node.worker("d0")
    root, ids = prompt(20)
    await decode.reserve("a", node.capability("a", ids), ids, root, 0)
    other_root, other = prompt(10, seed=1)
    before = node.counts()
    with pytest.raises(OutOfPages):
        await decode.reserve("b", node.capability("b", other), other, other_root, 3)
    assert node.counts() == before
    with pytest.raises(OutOfPages):
        await decode.reserve("c", node.capability("c", ids), ids, root, 13)
    assert node.counts() == before
    assert not await decode.grow(13)
    assert await decode.grow(12)
    await decode.release("a")
    assert await decode.grow(32)


async def test_idle_pages_of_the_asker_are_used_before_it_is_refused(node: Node) -> None:
    decode = await node.worker("d0")
    assert await decode.grow(30)
    root, ids = prompt(20)
    assert (await decode.reserve("a", node.capability("a", ids), ids, root, 0)).missing == 20


async def test_a_block_is_evicted_after_those_that_continue_it(node: Node) -> None:
    decode = await node.worker("d0")
    root, ids = prompt(32)
    await decode.reserve("a", node.capability("a", ids), ids, root, 0)
    await compute(node, decode, "a", root, ids)
    await decode.release("a")
    assert node.counts() == {"cached": 32}
    other_root, other = prompt(5, seed=1)
    await decode.reserve("b", node.capability("b", other), other, other_root, 0)
    assert node.store.lookup(MODEL, FINGERPRINT, [ids]) == [27], "from the end of the chain"


async def test_stale_and_foreign_handles_are_refused(node: Node) -> None:
    one, two = await node.worker("d0"), await node.worker("d1")
    root, ids = prompt(2)
    assert await one.grow(1)
    pages = one.take(1)
    assert pages is not None
    page = pages[0]
    stale = CommitItem(Page(page.index, page.generation - 1), ids[0], root)
    with pytest.raises(StaleHandle):
        await one.commit("x", [stale])
    with pytest.raises(StaleHandle):
        await two.commit("x", [CommitItem(page, ids[0], root)])
    with pytest.raises(StaleHandle):
        await one.commit("x", [CommitItem(Page(9999, 1), ids[0], root)])
    await one.commit("x", [CommitItem(page, ids[0], root)])
    assert await one.commit("x", [CommitItem(page, ids[0], root)]) == [page], "idempotent"
    with pytest.raises(StaleHandle):
        await one.commit("x", [CommitItem(page, ids[1], ids[0])])


async def test_capabilities_bind_handoff_chain_org_and_model(node: Node) -> None:
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    root, ids = prompt(3)
    _, foreign = prompt(3, seed=7)
    for refused in (
        node.capability("other", ids),
        node.capability("r/0", foreign),
        node.capability("r/0", ids, org=""),
        node.capability("r/0", ids, model="another"),
    ):
        with pytest.raises(PermissionDenied):
            await decode.reserve("r/0", refused, ids, root, 0)
    for refused in ("", "no.token.atall", node.capability("r/0", ids, minted_by="decode")):
        with pytest.raises(Unauthenticated):
            await decode.reserve("r/0", refused, ids, root, 0)
    await decode.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    with pytest.raises(PermissionDenied):
        await prefill.draw("r/0", 0, node.capability("r/1", ids))
    with pytest.raises(PermissionDenied):
        await prefill.draw("r/0", 0, node.capability("r/0", ids, org="rival"))
    assert node.counts() == {"free": 29, "granted": 3}


async def test_two_organisations_never_share_a_block(node: Node) -> None:
    decode = await node.worker("d0")
    root, ids = prompt(4)
    rival_root, rival = prompt(4, salt=b"salt of a rival!")
    await decode.reserve("a", node.capability("a", ids), ids, root, 0)
    await compute(node, decode, "a", root, ids)
    reserved = await decode.reserve("b", node.capability("b", rival, org="rival"), rival, rival_root, 0)
    assert (reserved.have, reserved.missing) == ([], 4)


async def test_who_may_call_what(node: Node) -> None:
    await node.worker("d0")
    allowed = {
        "Lookup": ("router", pages_pb2.LookupRequest(model=MODEL)),
        "Stats": ("operator", pages_pb2.StatsRequest()),
    }
    for method, (role, request) in allowed.items():
        for asking in ("router", "operator", "decode", "prefill", "iam"):
            call = getattr(node.stub(asking), method)(request)
            if asking == role:
                await call
            else:
                assert isinstance(await refusal(call), PermissionDenied)
    for role in ("router", "operator", "iam", "kvstore"):
        attach = node.stub(role).Attach(iter([pages_pb2.AttachRequest()]))
        assert isinstance(await refusal(attach.read()), PermissionDenied)
        assert isinstance(await refusal(node.stub(role).Grant(pages_pb2.GrantRequest())), PermissionDenied)
    pull = node.stub("kvstore").Pull(pages_pb2.PullRequest())
    assert isinstance(await refusal(pull.read()), InvalidRequest)
    attach = pages_pb2.Attach(worker="d0", model=MODEL, content_fingerprint=FINGERPRINT)
    call = node.stub("decode", "d7").Attach(iter([pages_pb2.AttachRequest(attach=attach)]))
    assert isinstance(await refusal(call.read()), PermissionDenied), "in another worker's name"


async def test_an_rpc_of_an_earlier_session_or_another_worker_is_refused(node: Node) -> None:
    kv = await node.worker("d0")
    await node.worker("d1")
    session = node.store._sessions[kv.epoch].number
    grant = pages_pb2.GrantRequest(epoch=kv.epoch, session=session, pages=1)
    assert isinstance(await refusal(node.stub("decode", "d1").Grant(grant)), PermissionDenied)
    grant.session += 1
    assert isinstance(await refusal(node.stub("decode", "d0").Grant(grant)), Unavailable)


async def test_lookup_listing_and_events_tell_the_same(node: Node) -> None:
    decode = await node.worker("d0")
    root, ids = prompt(6)
    await decode.reserve("a", node.capability("a", ids), ids, root, 0)
    await compute(node, decode, "a", root, ids)
    await decode.release("a")
    _, other = prompt(3, seed=1)
    router = node.stub("router")
    chains = [pages_pb2.Chain(block_ids=c) for c in (ids, [*ids[:4], *other], other, [])]
    request = pages_pb2.LookupRequest(model=MODEL, content_fingerprint=FINGERPRINT, chains=chains)
    assert list((await router.Lookup(request)).prefix_blocks) == [6, 4, 0, 0]
    request.content_fingerprint = b"another"
    assert list((await router.Lookup(request)).prefix_blocks) == [0, 0, 0, 0]

    listing = [m async for m in router.ListBlocks(pages_pb2.ListBlocksRequest(model=MODEL))]
    assert sorted(b for m in listing for b in m.block_ids) == sorted(ids)
    events = [json.loads(e) for e in node.events]
    sequence = [e["seq"] for e in events]
    assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))
    assert listing[0].sequence == sequence[-1]
    assert [b for e in events for b in e["stored"]] == [i.hex() for i in ids]

    assert await decode.grow(30)
    removed = [b for e in node.events[len(events) :] for b in json.loads(e)["removed"]]
    assert removed == [i.hex() for i in reversed(ids[2:])]
    stats = (await node.stats()).arenas[0]
    assert (stats.total, stats.granted, stats.cached, stats.evicted_blocks) == (32, 30, 2, 4)


async def test_freed_pages_are_poisoned_in_the_debug_mode(node: Node) -> None:
    decode = await node.worker("d0")
    assert await decode.grow(3)
    pages = decode.take(3)
    assert pages is not None
    for page in pages:
        write(decode, page, b"x" * 16)
    decode.give(pages)
    await decode.close()
    for page in pages:
        assert holds(decode, page, b"\xff" * 16)


async def test_malformed_requests_are_refused_with_the_field(node: Node) -> None:
    decode = await node.worker("d0")
    root, ids = prompt(2)
    bad = [ids[0], b"short"]
    with pytest.raises(MeshError) as refused:
        await decode.reserve("a", node.capability("a", bad), bad, root, 0)
    assert refused.value.param == "block_ids"
    twice = [ids[0], ids[0]]
    with pytest.raises(MeshError, match="twice"):
        await decode.reserve("a", node.capability("a", twice), twice, root, 0)
    with pytest.raises(MeshError, match="empty"):
        await decode.reserve("", node.capability("", ids), ids, root, 0)
    layout = layout_to_proto(LAYOUT)
    layout.planes[1].offset = 1000
    attach = pages_pb2.Attach(worker="d9", model=MODEL, content_fingerprint=FINGERPRINT, layout=layout)
    call = node.stub("decode", "d9").Attach(iter([pages_pb2.AttachRequest(attach=attach)]))
    assert "overlaps" in str(await refusal(call.read()))
    layout.planes[1].kind = common_pb2.PLANE_KIND_UNSPECIFIED
    attach.layout.CopyFrom(layout)
    call = node.stub("decode", "d9").Attach(iter([pages_pb2.AttachRequest(attach=attach)]))
    assert "unknown page layout" in str(await refusal(call.read()))


async def refusal(call: object) -> MeshError:
    """The error that a call must end with."""
    try:
        async with asyncio.timeout(5):
            await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was not refused")
