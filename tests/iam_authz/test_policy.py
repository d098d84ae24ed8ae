"""What routers are told, and how soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz.database import Database
from iam_authz.directory import Directory, Snapshot
from iam_authz.pepper import Pepper
from iam_authz.records import CatalogueModel, Effect, Grant
from iam_authz.registry import Registry
from mesh.errors import NotFound
from tests.iam_authz.world import World, running_iam

WITHIN_S = 1.0


class Watch:
    """A router's stream of policies."""

    def __init__(self, world: World, version: int = 0) -> None:
        self._stream: Any = world.policy.Watch(iam_pb2.WatchRequest(version=version))

    async def next(self) -> iam_pb2.WatchResponse:
        async with asyncio.timeout(WITHIN_S):
            response = await self._stream.read()
        assert isinstance(response, iam_pb2.WatchResponse)
        return response

    async def until(self, true: Callable[[iam_pb2.WatchResponse], bool]) -> iam_pb2.WatchResponse:
        async with asyncio.timeout(WITHIN_S):
            while not true(response := await self.next()):
                pass
        return response

    async def rest(self) -> AsyncIterator[iam_pb2.WatchResponse]:
        while isinstance(response := await self._stream.read(), iam_pb2.WatchResponse):
            yield response


async def test_the_whole_policy_comes_first_and_every_change_is_pushed(world: World) -> None:
    await world.organisation()
    await world.model("org/small")
    watch = Watch(world)
    first = await watch.next()
    (organisation,) = first.organisations
    assert (organisation.id, organisation.suspended, len(organisation.cache_salt)) == ("acme", False, 32)
    assert [(g.organisation, g.model, g.effect) for g in first.grants] == [
        ("acme", "*", iam_pb2.GRANT_EFFECT_ALLOW)
    ]
    (model,) = first.models
    assert (model.name, model.source, model.owned_by) == ("org/small", "tiny:seed=1", "kvmesh")
    assert abs(model.created - time.time()) < 60

    created = await world.key()
    assert list((await watch.next()).revoked_credentials) == []
    began = time.perf_counter()
    await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
    pushed = await watch.next()
    assert time.perf_counter() - began < WITHIN_S
    assert list(pushed.revoked_credentials) == [created.key.id]
    assert pushed.version > first.version
    # The salt, and with it every cached block, outlives a change of its organisation.
    await world.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id="acme", suspended=True))
    suspended = (await watch.next()).organisations[0]
    assert (suspended.suspended, suspended.cache_salt) == (True, organisation.cache_salt)


async def test_a_router_that_is_up_to_date_still_hears_at_once(world: World) -> None:
    await world.organisation()
    version = (await Watch(world).next()).version
    assert (await Watch(world, version).next()).version == version


async def test_what_changes_nothing_is_not_pushed(world: World) -> None:
    await world.organisation()
    created = await world.key()
    await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
    watch = Watch(world)
    version = (await watch.next()).version
    await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
    with pytest.raises(grpc.aio.AioRpcError):
        await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id="nobody"))
    await world.iam.last_used.flush()
    await world.model("later")
    assert (await watch.next()).version == version + 1


async def test_watches_end_when_iam_stops(world: World) -> None:
    watch = Watch(world)
    await watch.next()
    world.iam.directory.close()
    async with asyncio.timeout(WITHIN_S):
        assert [response async for response in watch.rest()] == []


async def test_only_routers_may_watch(world: World) -> None:
    for role in ("operator", "edge", "decode", "prefill", "kvstore"):
        stub = iam_pb2_grpc.PolicyStub(world.channel(role))
        call: Any = stub.Watch(iam_pb2.WatchRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_another_process_s_change_is_seen_without_nats(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running_iam(tmp_path, name="iam-0"))
        two = await stack.enter_async_context(running_iam(tmp_path, name="iam-1"))
        await one.organisation()
        created = await one.key()
        two.iam.directory._looked = float("-inf")  # as if a second had passed
        assert (await two.check(f"Bearer {created.secret}")).status.code == 0
        await one.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
        two.iam.directory._looked = float("-inf")
        assert (await two.check(f"Bearer {created.secret}")).status.code != 0


@dataclass
class Bus:
    """NATS as IAM sees it: what one publishes, the others hear."""

    heard: list[Callable[[str, bytes], Awaitable[None] | None]] = field(default_factory=list)
    published: list[tuple[str, bytes]] = field(default_factory=list)
    usage: Callable[[bytes], Awaitable[None]] | None = None

    async def publish(self, subject: str, data: bytes) -> bool:
        self.published.append((subject, data))
        for listener in self.heard:
            result = listener(subject, data)
            if result is not None:
                await result
        return True

    async def subscribe(
        self, subject: str, on_message: Callable[[str, bytes], Awaitable[None] | None]
    ) -> None:
        assert subject == "iam.policy"
        self.heard.append(on_message)

    async def consume_usage(self, on_record: Callable[[bytes], Awaitable[None]]) -> None:
        self.usage = on_record

    def on_connected(self, hook: Callable[[], Awaitable[None]]) -> None:
        pass


async def test_another_process_s_change_is_pushed_after_a_hint(tmp_path: Path) -> None:
    bus = Bus()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running_iam(tmp_path, name="iam-0", news=bus))
        two = await stack.enter_async_context(running_iam(tmp_path, name="iam-1", news=bus))
        watch = Watch(two)
        await watch.next()
        await one.organisation("acme")
        pushed = await watch.until(lambda response: bool(response.organisations))
        assert pushed.organisations[0].id == "acme"
        version = one.iam.directory.snapshot.version
        assert bus.published[-1] == ("iam.policy", b"%d" % version)


# Random histories against the plainest possible reading of the rule in `directory.py`.

ORGANISATIONS = ("a", "b")
MODELS = ("m1", "m2", "x/y")

operations = st.one_of(
    st.tuples(st.just("organisation"), st.sampled_from(ORGANISATIONS), st.booleans()),
    st.tuples(st.just("model"), st.sampled_from(MODELS)),
    st.tuples(st.just("unmodel"), st.sampled_from(MODELS)),
    st.tuples(
        st.just("grant"), st.sampled_from(ORGANISATIONS), st.sampled_from((*MODELS, "*")), st.booleans()
    ),
    st.tuples(st.just("ungrant"), st.sampled_from(ORGANISATIONS), st.sampled_from((*MODELS, "*"))),
)


@dataclass
class Reference:
    suspended: dict[str, bool] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    grants: dict[tuple[str, str], bool] = field(default_factory=dict)

    def apply(self, operation: Any) -> bool:
        """Whether it is a legal one."""
        match operation:
            case ("organisation", name, suspended):
                self.suspended[name] = suspended
            case ("model", name):
                self.models.add(name)
            case ("unmodel", name):
                if name not in self.models:
                    return False
                self.models.remove(name)
            case ("grant", name, model, allow):
                if name not in self.suspended:
                    return False
                self.grants[name, model] = allow
            case ("ungrant", name, model):
                return self.grants.pop((name, model), None) is not None
        return True

    def allowed(self, name: str, model: str) -> bool:
        if self.suspended.get(name, True) or model not in self.models:
            return False
        said = [self.grants[place] for place in ((name, model), (name, "*")) if place in self.grants]
        return bool(said) and all(said)


def decide(snapshot: Snapshot, organisation: str, model: str) -> bool:
    """The six rules, as a router would read them."""
    known = {o.id for o in snapshot.organisations if not o.suspended}
    effects = {
        g.effect for g in snapshot.grants if g.organisation == organisation and g.model in (model, "*")
    }
    in_catalogue = model in {m.name for m in snapshot.models}
    return organisation in known and in_catalogue and effects == {Effect.ALLOW}


async def run(registry: Registry, operation: Any) -> bool:
    try:
        match operation:
            case ("organisation", name, suspended):
                await registry.put_organisation(name, suspended=suspended, actor="t")
            case ("model", name):
                await registry.put_model(CatalogueModel(name, "tiny:", 0, ""), actor="t")
            case ("unmodel", name):
                await registry.remove_model(name, actor="t")
            case ("grant", name, model, allow):
                effect = Effect.ALLOW if allow else Effect.DENY
                await registry.put_grant(Grant(name, model, effect), actor="t")
            case ("ungrant", name, model):
                await registry.remove_grant(name, model, actor="t")
    except NotFound:
        return False
    return True


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(operations, max_size=12))
def test_decisions_agree_with_a_plain_reading_of_history(history: list[Any]) -> None:
    async def play() -> None:
        with TemporaryDirectory() as folder:
            database = await Database.open(Path(folder) / "iam.db")
            try:
                directory, other = Directory(database), Directory(database)
                registry = Registry(database, directory, Pepper(bytes(32)))
                await registry.open()
                reference = Reference()
                for operation in history:
                    assert await run(registry, operation) == reference.apply(operation)
                    await other.refresh()
                    for organisation in (*ORGANISATIONS, "c"):
                        for model in (*MODELS, "m3"):
                            expected = reference.allowed(organisation, model)
                            assert decide(directory.snapshot, organisation, model) == expected
                            assert decide(other.snapshot, organisation, model) == expected
            finally:
                await database.close()

    asyncio.run(play())
