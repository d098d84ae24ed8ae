"""What operators may do, and what they are told when it cannot be."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz import audit
from iam_authz.pepper import Pepper
from mesh.errors import InvalidRequest, MeshError, NotFound, from_rpc_error
from tests.iam_authz.world import World

ALLOW = iam_pb2.GRANT_EFFECT_ALLOW


async def error_of(call: Awaitable[Any]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


def grant(organisation: str, model: str, effect: iam_pb2.GrantEffect.ValueType) -> iam_pb2.PutGrantRequest:
    return iam_pb2.PutGrantRequest(grant=iam_pb2.Grant(organisation=organisation, model=model, effect=effect))


async def test_a_key_is_shown_once_and_listed_without_it(world: World) -> None:
    await world.organisation()
    await world.model("m")
    created = await world.key(name="laptop", expires_in_s=3_600, models=["m", "m"])
    assert created.secret.startswith(f"kvm_{created.key.id}_")
    assert created.key.expires == created.key.created + 3_600
    assert list(created.key.models) == ["m"]
    (listed,) = (await world.admin.ListKeys(iam_pb2.ListKeysRequest(organisation="acme"))).keys
    assert listed == created.key
    assert created.secret not in str(listed)
    await world.organisation("other")
    await world.key("other")
    assert len((await world.admin.ListKeys(iam_pb2.ListKeysRequest())).keys) == 2
    assert len((await world.admin.ListKeys(iam_pb2.ListKeysRequest(organisation="acme"))).keys) == 1


async def test_operators_never_see_a_cache_salt(world: World) -> None:
    await world.organisation()
    (found,) = (await world.admin.ListOrganisations(iam_pb2.ListOrganisationsRequest())).organisations
    assert (found.id, found.cache_salt) == ("acme", b"")


async def test_grants_are_listed_and_one_for_a_model_to_come_says_so(world: World) -> None:
    await world.organisation()
    await world.organisation("other")
    await world.model("m")
    assert (await world.admin.PutGrant(grant("acme", "m", ALLOW))).in_catalogue
    assert (await world.admin.PutGrant(grant("other", "*", ALLOW))).in_catalogue
    assert not (await world.admin.PutGrant(grant("acme", "typo", ALLOW))).in_catalogue

    async def listed(organisation: str) -> list[tuple[str, str]]:
        found = await world.admin.ListGrants(iam_pb2.ListGrantsRequest(organisation=organisation))
        return [(g.organisation, g.model) for g in found.grants]

    assert await listed("acme") == [("acme", "*"), ("acme", "m"), ("acme", "typo")]
    assert await listed("") == [("acme", "*"), ("acme", "m"), ("acme", "typo"), ("other", "*")]
    error = await error_of(world.admin.ListGrants(iam_pb2.ListGrantsRequest(organisation="nobody")))
    assert isinstance(error, NotFound)


async def test_wrong_values_are_refused_with_their_field(world: World) -> None:
    await world.organisation()
    await world.model("m")
    admin = world.admin

    def key(**fields: Any) -> Awaitable[Any]:
        request = {"organisation": "acme", "name": "k"} | fields
        return admin.CreateKey(iam_pb2.CreateKeyRequest(**request))

    def organisation(name: str) -> Awaitable[Any]:
        return admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id=name))

    def model(**fields: Any) -> Awaitable[Any]:
        entry = {"name": "x", "source": "tiny:"} | fields
        return admin.PutModel(iam_pb2.PutModelRequest(model=iam_pb2.CatalogueModel(**entry)))

    wrong: list[tuple[Awaitable[Any], str]] = [
        (key(name=""), "name"),
        (key(name="  "), "name"),
        (key(name="a\nb"), "name"),
        (key(name="x" * 101), "name"),
        (key(organisation="../etc"), "organisation"),
        (key(organisation=""), "organisation"),
        (key(expires_in_s=0), "expires_in_s"),
        (key(expires_in_s=-5), "expires_in_s"),
        (key(expires_in_s=2**40), "expires_in_s"),
        (key(models=["unknown"]), "models"),
        (key(models=["*"]), "models"),
        (key(models=[""]), "models"),
        (key(models=["m"] * 65), "models"),
        (key(models=["a" * 100] * 20), "models"),
        (organisation(""), "id"),
        (organisation("a b"), "id"),
        (organisation("*"), "id"),
        (organisation(".hidden"), "id"),
        (organisation("x" * 65), "id"),
        (organisation("é"), "id"),
        (model(name=""), "model.name"),
        (model(name="*"), "model.name"),
        (model(name="/x"), "model.name"),
        (model(name="x/"), "model.name"),
        (model(name="a//b"), "model.name"),
        (model(name="a/../b"), "model.name"),
        (model(name="a b"), "model.name"),
        (model(name="a\n"), "model.name"),
        (model(name="x" * 129), "model.name"),
        (model(source=""), "model.source"),
        (model(source=" "), "model.source"),
        (model(source="a\0b"), "model.source"),
        (model(created=-1), "model.created"),
        (model(owned_by="x" * 101), "model.owned_by"),
        (admin.PutModel(iam_pb2.PutModelRequest()), "model.name"),
        (admin.PutGrant(grant("acme", "m", iam_pb2.GRANT_EFFECT_UNSPECIFIED)), "grant.effect"),
        (admin.PutGrant(grant("acme", "", ALLOW)), "grant.model"),
        (admin.PutGrant(grant("acme", "m*", ALLOW)), "grant.model"),
        (admin.PutGrant(grant("", "m", ALLOW)), "grant.organisation"),
        (admin.PutGrant(iam_pb2.PutGrantRequest()), "grant.effect"),
        (admin.ListUsage(iam_pb2.ListUsageRequest(since=-1)), "since"),
    ]
    for call, param in wrong:
        error = await error_of(call)
        assert isinstance(error, InvalidRequest), param
        assert error.param == param
        assert len(error.message) > 20


async def test_what_is_not_there_is_not_found(world: World) -> None:
    await world.organisation(allow=None)
    admin = world.admin
    missing: list[tuple[Awaitable[Any], str]] = [
        (admin.CreateKey(iam_pb2.CreateKeyRequest(organisation="no", name="k")), "organisation_not_found"),
        (admin.ListKeys(iam_pb2.ListKeysRequest(organisation="no")), "organisation_not_found"),
        (admin.PutGrant(grant("no", "m", ALLOW)), "organisation_not_found"),
        (
            admin.RemoveGrant(iam_pb2.RemoveGrantRequest(organisation="acme", model="m")),
            "grant_not_found",
        ),
        (admin.RemoveModel(iam_pb2.RemoveModelRequest(name="m")), "model_not_found"),
        (admin.RevokeKey(iam_pb2.RevokeKeyRequest(id="nobody")), "key_not_found"),
        (admin.RevokeKey(iam_pb2.RevokeKeyRequest(id="")), "key_not_found"),
        (admin.RevokeKey(iam_pb2.RevokeKeyRequest(id="jwt_" + "x" * 500)), "key_not_found"),
    ]
    for call, code in missing:
        error = await error_of(call)
        assert isinstance(error, NotFound)
        assert error.code == code


async def test_good_names_are_taken(world: World) -> None:
    for name in ("a", "A-1", "org_1.eu", "0"):
        await world.organisation(name, allow=None)
    for name in ("m", "meta-llama/Llama-3.1-8B", "ft:gpt:acme::x1", "a/b/c", "SmolLM2"):
        await world.model(name)
    names = {model.name for model in world.iam.directory.snapshot.models}
    assert "meta-llama/Llama-3.1-8B" in names


async def test_a_model_keeps_its_birthday_when_its_source_changes(world: World) -> None:
    model = iam_pb2.CatalogueModel(name="m", source="one", created=1_000, owned_by="me")
    await world.admin.PutModel(iam_pb2.PutModelRequest(model=model))
    await world.admin.PutModel(iam_pb2.PutModelRequest(model=iam_pb2.CatalogueModel(name="m", source="two")))
    (found,) = world.iam.directory.snapshot.models
    assert (found.source, found.created, found.owned_by) == ("two", 1_000, "kvmesh")


async def test_only_operators_may_administer(world: World) -> None:
    for role in ("router", "edge", "decode", "iam"):
        stub = iam_pb2_grpc.AdminStub(world.channel(role))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListKeys(iam_pb2.ListKeysRequest())
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_audit_trail_tells_all_changes_and_no_secret(world: World) -> None:
    await world.organisation()
    await world.model("m")
    created = await world.key()
    await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
    await world.admin.RemoveModel(iam_pb2.RemoveModelRequest(name="m"))
    await world.admin.RemoveGrant(iam_pb2.RemoveGrantRequest(organisation="acme", model="*"))
    trail = await world.iam.registry.audit_trail()
    assert [(entry.actor, entry.action, entry.target) for entry in trail] == [
        ("operator-0", "organisation.put", "acme"),
        ("operator-0", "grant.put", "acme"),
        ("operator-0", "model.put", "m"),
        ("operator-0", "key.create", created.key.id),
        ("operator-0", "key.revoke", created.key.id),
        ("operator-0", "model.remove", "m"),
        ("operator-0", "grant.remove", "acme"),
    ]
    assert all(abs(entry.time_ms / 1000 - time.time()) < 60 for entry in trail)
    assert created.secret[20:40] not in str(trail)
    pepper = Pepper.load(world.state / "iam" / "pepper", create=False)
    assert audit.first_break(trail, pepper) is None
