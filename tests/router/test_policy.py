"""The one decision: default deny, deny wins, a credential narrows, unknown and forbidden look alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import MeshError, ModelNotFound, PermissionDenied, Unauthenticated, Unavailable
from router import wire
from router.core.policy import Snapshot, decide, permits, visible
from router.core.policy_watch import PolicyHolder
from router.core.request import Caller
from tests.router.world import policy, until


def caller(org: str = "acme", models: frozenset[str] | None = None, credential: str = "k1") -> Caller:
    return Caller(org, "p", "u", credential, models, "r")


def test_who_may_do_what() -> None:
    snapshot = wire.snapshot(policy(1, revoked=["k9"]))
    assert decide(snapshot, caller(), "tiny")[1].name == "tiny"
    refused: list[tuple[Caller, str, type[MeshError]]] = [
        (caller(), "secret", ModelNotFound),
        (caller(), "absent", ModelNotFound),
        (caller("beta"), "tiny", ModelNotFound),
        (caller(models=frozenset({"org/other"})), "tiny", ModelNotFound),
        (caller(models=frozenset()), "tiny", ModelNotFound),
        (caller(models=frozenset({"secret"})), "secret", ModelNotFound),
        (caller("gone"), "tiny", PermissionDenied),
        (caller("never"), "tiny", PermissionDenied),
        (caller(credential="k9"), "tiny", Unauthenticated),
    ]
    for who, model, error in refused:
        with pytest.raises(error) as caught:
            decide(snapshot, who, model)
        if error is ModelNotFound:
            assert caught.value.message == (
                f"The model `{model}` does not exist or you do not have access to it."
            )
    assert "salt" not in repr(snapshot.organisations["acme"]).replace("cache_salt", "")


@given(
    st.sampled_from(["acme", "beta"]),
    st.none() | st.frozensets(st.sampled_from(["tiny", "secret", "org/other", "*"])),
    st.sampled_from(["tiny", "secret", "org/other", "absent", "*", ""]),
)
def test_the_list_is_what_can_be_called(org: str, models: frozenset[str] | None, model: str) -> None:
    snapshot, who = wire.snapshot(policy()), caller(org, models)
    listed = {entry.name for entry in visible(snapshot, who)}
    assert (model in listed) == permits(snapshot, who, model)
    assert "secret" not in listed
    assert org == "acme" or not listed


class Source:
    """Snapshots that a test hands out; `None` breaks the stream."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Snapshot | None] = asyncio.Queue()
        self.calls: list[tuple[str, int]] = []

    async def watch(self, address: str, version: int) -> AsyncIterator[Snapshot]:
        self.calls.append((address, version))
        while (snapshot := await self.queue.get()) is not None:
            yield snapshot
        raise OSError("broken")


async def test_the_first_snapshot_can_be_waited_for() -> None:
    source = Source()
    holder = PolicyHolder(["a"], source.watch)
    running = asyncio.create_task(holder.run())
    assert not await holder.arrived(0.01)
    waiting = asyncio.create_task(holder.arrived(20))
    source.queue.put_nowait(wire.snapshot(policy(7)))
    assert await waiting
    assert holder.current().version == 7
    running.cancel()


async def test_the_last_snapshot_is_kept_for_a_bounded_time() -> None:
    now = [0.0]
    source = Source()
    holder = PolicyHolder(["a", "b"], source.watch, usable_s=60, clock=lambda: now[0])
    with pytest.raises(Unavailable):
        holder.current()
    seen: list[int] = []
    holder.on_change.append(lambda snapshot: seen.append(snapshot.version))
    running = asyncio.ensure_future(holder.run())
    source.queue.put_nowait(wire.snapshot(policy(1)))
    source.queue.put_nowait(wire.snapshot(policy(2)))
    await until(lambda: seen == [1, 2])
    now[0] = 1000.0
    assert holder.current().version == 2
    source.queue.put_nowait(None)
    await until(lambda: source.calls[1:] == [("b", 2)])
    now[0] = 1059.0
    assert holder.current().version == 2
    now[0] = 1061.0
    with pytest.raises(Unavailable):
        holder.current()
    source.queue.put_nowait(wire.snapshot(policy(3)))
    await until(lambda: seen[-1] == 3)
    assert holder.current().version == 3
    running.cancel()


async def test_a_hint_restarts_a_stream_that_does_not_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.core.policy_watch.HINT_PATIENCE_S", 0.02)
    source = Source()
    holder = PolicyHolder(["a", "b"], source.watch)
    running = asyncio.ensure_future(holder.run())
    source.queue.put_nowait(wire.snapshot(policy(5)))
    await until(lambda: holder.usable)
    holder.hint(5)
    holder.hint(4)
    assert holder._hint is None
    holder.hint(6)
    await until(lambda: [address for address, _ in source.calls] == ["a", "b"])
    running.cancel()
