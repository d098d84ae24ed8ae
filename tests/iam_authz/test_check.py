"""What Envoy is told about a request."""

from __future__ import annotations

import base64
import json
import logging
import re
import sqlite3
import time

import grpc
import pytest
from google.rpc import status_pb2
from kvmesh.extern import ext_authz_pb2 as authz
from kvmesh.extern import ext_authz_pb2_grpc
from kvmesh.v1 import common_pb2, iam_pb2

from iam_authz import tables
from iam_authz.api_key import SECRET_LENGTH, _checksum, new_key, parse_key
from iam_authz.database import Database
from iam_authz.pepper import Pepper
from iam_authz.records import ApiKey
from tests.iam_authz.world import World


def denied(response: authz.CheckResponse) -> tuple[int, dict[str, str], dict[str, object]]:
    assert response.HasField("denied_response")
    assert response.status.code != 0
    answer = response.denied_response
    headers = {option.header.key: option.header.value for option in answer.headers}
    error: dict[str, object] = json.loads(answer.body)["error"]
    return answer.status.code, headers, error


async def test_a_key_gives_a_signed_identity_and_loses_every_other_claim_to_one(world: World) -> None:
    await world.organisation()
    await world.model("org/small")
    created = await world.key(models=["org/small"])
    response = await world.check(
        f"Bearer {created.secret}",
        x_mesh_identity="forged",
        x_mesh_org="evil",
        x_mesh_principal="root",
        x_mesh_start="1.5",
        x_mesh_service="edge-token",
    )
    assert response.status.code == 0
    (option,) = response.ok_response.headers
    assert option.append_action == authz.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert set(response.ok_response.headers_to_remove) == {"authorization", "x-mesh-org", "x-mesh-principal"}
    token = world.identity_of(response)
    assert token.role == "iam"
    assert dict(token.claims) == {
        "org": "acme",
        "project": "default",
        "principal": f"key:{created.key.id}",
        "credential": created.key.id,
        "request_id": "req-1",
        "models": ["org/small"],
    }


async def test_a_key_may_come_in_the_header_of_the_messages_dialect(world: World) -> None:
    await world.organisation()
    secret = (await world.key()).secret
    response = await world.check(None, x_api_key=secret)
    assert world.identity_of(response).claims["org"] == "acme"
    assert set(response.ok_response.headers_to_remove) == {"authorization", "x-api-key"}
    assert (await world.check(f"Bearer {secret}", x_api_key=secret)).status.code == 0
    other = (await world.key()).secret
    for authorization, key in (
        (f"Bearer {other}", secret),
        (f"Bearer {secret}", "wrong"),
        (None, f"x {secret}"),
    ):
        assert denied(await world.check(authorization, x_api_key=key))[0] == 401
    refused = await world.check(None, path="/v1/messages/count_tokens", x_api_key="wrong")
    body = json.loads(refused.denied_response.body)
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


async def test_a_key_without_a_limit_names_no_models(world: World) -> None:
    await world.organisation()
    created = await world.key()
    assert world.identity_of(await world.check(f"bearer  {created.secret}")).claims["models"] is None


async def test_whoever_is_nobody_gets_openai_s_401(world: World) -> None:
    await world.organisation()
    key = (await world.key()).secret
    attacks: dict[str, str | None] = {
        "no header": None,
        "empty": "",
        "blank": "   ",
        "scheme alone": "Bearer",
        "no scheme": key,
        "another scheme": f"Basic {key}",
        "two headers": f"Bearer {key},Bearer {key}",
        "two headers, spaced": f"Bearer {key}, Bearer {key}",
        "two credentials": f"Bearer {key} {key}",
        "trailing comma": f"Bearer {key},",
        "leading comma": f", Bearer {key}",
        "unknown key": f"Bearer {new_key().text}",
        "one character wrong": f"Bearer {key[:-8]}{'A' if key[-8] != 'A' else 'B'}{key[-7:]}",
        "cut": f"Bearer {key[:-1]}",
        "longer": f"Bearer {key}x",
        "not ASCII": f"Bearer {key[:-1]}é",
        "wide digits": f"Bearer {key[:-1]}１",
        "emoji": "Bearer 🔑",
        "null byte": f"Bearer {key}\0",
        "line break": f"Bearer {key}\r\nx-mesh-identity: me",
        "9 KB": "Bearer " + "a" * 9_000,
        "9 KB of a key": "Bearer kvm_" + "a" * 9_000,
        "60 KB": "Bearer " + "a.b" * 20_000,
        "lower case key": f"Bearer {key.lower()}",
        "OpenAI's prefix": "Bearer sk-abcdefghijklmnopqrstuvwxyz",
        "not a JWT": "Bearer a.b.c",
        "dots": "Bearer ..",
    }
    for name, value in attacks.items():
        status, headers, error = denied(await world.check(value))
        assert status == 401, name
        assert headers["www-authenticate"] == "Bearer", name
        assert headers["x-request-id"] == "req-1", name
        assert headers["content-type"] == "application/json", name
        assert set(error) == {"message", "type", "param", "code"}, name
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            "invalid_api_key",
        ), name
        assert key[20:40] not in str(error), name
    assert (await world.check(f"Bearer {key}")).status.code == 0


async def test_headers_that_differ_in_case_only_are_two(world: World) -> None:
    await world.organisation()
    key = (await world.key()).secret
    assert denied(await world.check(f"Bearer {key}", Authorization=f"Bearer {key}"))[0] == 401


async def test_the_right_secret_under_another_id_opens_nothing(world: World) -> None:
    await world.organisation()
    one, two = await world.key(), await world.key()
    swapped = one.secret.replace(one.key.id, two.key.id)
    assert denied(await world.check(f"Bearer {swapped}"))[0] == 401


async def test_a_whole_key_of_a_known_id_with_another_secret_opens_nothing(world: World) -> None:
    await world.organisation()
    public_id = (await world.key()).key.id
    body = f"kvm_{public_id}_{new_key().text.split('_')[2][:SECRET_LENGTH]}"
    guess = body + _checksum(body)
    assert parse_key(guess) is not None, "only the hash can tell"
    assert denied(await world.check(f"Bearer {guess}"))[0] == 401


async def test_a_revoked_key_is_refused_by_the_very_next_check(world: World) -> None:
    await world.organisation()
    created = await world.key()
    assert (await world.check(f"Bearer {created.secret}")).status.code == 0
    await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
    status, _, error = denied(await world.check(f"Bearer {created.secret}"))
    assert (status, error["code"]) == (401, "invalid_api_key")


async def test_tokens_do_not_outlive_their_key(world: World) -> None:
    await world.organisation()
    created = await world.key(expires_in_s=20)
    response = await world.check(f"Bearer {created.secret}")
    payload = response.ok_response.headers[0].header.value.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    assert claims["exp"] <= created.key.expires + 0.01


async def test_an_expired_key_is_refused(world: World) -> None:
    await world.organisation()
    text = new_key()
    pepper = Pepper.load(world.state / "iam" / "pepper", create=False)
    digest = pepper.key_digest(text.text.encode())
    now = int(time.time())

    def add(connection: sqlite3.Connection) -> None:
        key = ApiKey(text.id, digest, "acme", "old", created=now - 60, expires=now - 1)
        tables.add_key(connection, key, tables.next_policy_version(connection))

    database = await Database.open(world.state / "iam" / "iam.db")
    await database.write(add)
    await database.close()
    await world.iam.directory.refresh()
    status, _, error = denied(await world.check(f"Bearer {text.text}"))
    assert status == 401
    assert "expired" in str(error["message"])
    assert text.id in world.iam.directory.snapshot.revoked


async def test_a_suspended_organisation_is_known_and_refused(world: World) -> None:
    await world.organisation()
    created = await world.key()
    await world.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id="acme", suspended=True))
    status, headers, error = denied(await world.check(f"Bearer {created.secret}"))
    assert (status, error["type"]) == (403, "permission_error")
    assert "www-authenticate" not in headers
    await world.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id="acme", suspended=False))
    assert (await world.check(f"Bearer {created.secret}")).status.code == 0


async def test_grpc_clients_get_the_message_and_a_typed_detail(world: World) -> None:
    response = await world.check(None, content_type="application/grpc+proto")
    assert response.denied_response.status.code == 401
    assert response.denied_response.body.startswith("You didn't provide an API key")
    headers = {option.header.key: option.header.value for option in response.denied_response.headers}
    status = status_pb2.Status.FromString(base64.b64decode(headers["grpc-status-details-bin"]))
    detail = common_pb2.ErrorDetail()
    assert status.details[0].Unpack(detail)
    assert (detail.code, detail.http_status) == ("invalid_api_key", 401)
    plain = await world.check(None)
    assert "grpc-status-details-bin" not in {o.header.key for o in plain.denied_response.headers}


async def test_a_strange_request_id_is_replaced(world: World) -> None:
    await world.organisation()
    key = (await world.key()).secret
    for strange in ("", "x" * 200, "a b", "é", "a\nb"):
        response = await world.check(f"Bearer {key}", x_request_id=strange)
        assert re.fullmatch(r"[0-9a-f-]{36}", world.identity_of(response).claims["request_id"])


async def test_logs_name_the_public_id_and_never_the_key(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await world.organisation()
    created = await world.key()
    await world.check(f"Bearer {created.secret}")
    await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
    await world.check(f"Bearer {created.secret}")
    text = "\n".join(str(vars(record)) for record in caplog.records)
    assert created.key.id in text
    assert "revoked" in text
    assert created.secret[20:40] not in text


async def test_only_the_edge_may_ask(world: World) -> None:
    for role in ("router", "operator", "decode", "prefill", "kvstore", "iam"):
        stub = ext_authz_pb2_grpc.AuthorizationStub(world.channel(role))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(authz.CheckRequest())
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    async with grpc.aio.insecure_channel(world.address) as anonymous:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ext_authz_pb2_grpc.AuthorizationStub(anonymous).Check(authz.CheckRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_identity_makes_the_same_decision_for_routers_without_envoy(world: World) -> None:
    await world.organisation()
    created = await world.key()
    answer = await world.identity.Authenticate(
        iam_pb2.AuthenticateRequest(authorization=f"Bearer {created.secret}", request_id="r-7")
    )
    assert answer.identity_token.count(".") == 2
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.identity.Authenticate(iam_pb2.AuthenticateRequest(authorization="Bearer no"))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
