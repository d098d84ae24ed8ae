"""`kvmesh keys`: create, list, revoke."""

from __future__ import annotations

import argparse
import json
import re
import time

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from mesh.cli.failure import Failure
from mesh.cli.iam import CALL_TIMEOUT_S, as_operator
from mesh.cli.style import table

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "create":
        return _create(arguments)
    return _revoke(arguments) if arguments.action == "revoke" else _list(arguments)


def _create(arguments: argparse.Namespace) -> int:
    request = iam_pb2.CreateKeyRequest(
        organisation=arguments.org, name=arguments.name, models=arguments.model
    )
    if arguments.expires is not None:
        request.expires_in_s = seconds(arguments.expires)

    async def create(admin: iam_pb2_grpc.AdminAsyncStub) -> iam_pb2.CreateKeyResponse:
        return await admin.CreateKey(request, timeout=CALL_TIMEOUT_S)

    made = as_operator(arguments.state, create)
    if arguments.json:
        print(json.dumps({**_fields(made.key), "secret": made.secret}))
    else:
        print(f"id      {made.key.id}\nkey     {made.secret}\n\nShown this once: only its hash is kept.")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    async def listed(admin: iam_pb2_grpc.AdminAsyncStub) -> iam_pb2.ListKeysResponse:
        return await admin.ListKeys(
            iam_pb2.ListKeysRequest(organisation=arguments.org), timeout=CALL_TIMEOUT_S
        )

    keys = as_operator(arguments.state, listed).keys
    if arguments.json:
        print(json.dumps([_fields(key) for key in keys], indent=1))
        return 0
    rows = [
        (
            key.id,
            key.organisation,
            key.name,
            _state(key),
            _day(key.created),
            _day(key.last_used),
            ",".join(key.models),
        )
        for key in keys
    ]
    print(table(rows, ("ID", "ORGANISATION", "NAME", "STATE", "CREATED", "LAST USED", "MODELS")))
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    async def revoke(admin: iam_pb2_grpc.AdminAsyncStub) -> None:
        await admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=arguments.id), timeout=CALL_TIMEOUT_S)

    as_operator(arguments.state, revoke)
    print(f"revoked {arguments.id}")
    return 0


def seconds(text: str) -> int:
    """`90s`, `12h`, `30d`; Failure for anything else."""
    match = re.fullmatch(r"(\d+)([smhdw])", text)
    if match is None or int(match[1]) == 0:
        raise Failure(f"--expires {text}: write 90s, 15m, 12h, 30d or 4w", status=2)
    return int(match[1]) * _UNITS_S[match[2]]


def _fields(key: iam_pb2.Key) -> dict[str, object]:
    return {
        "id": key.id,
        "organisation": key.organisation,
        "name": key.name,
        "created": key.created,
        "expires": key.expires or None,
        "revoked": key.revoked or None,
        "last_used": key.last_used or None,
        "models": list(key.models),
    }


def _state(key: iam_pb2.Key) -> str:
    if key.revoked:
        return f"revoked {_day(key.revoked)}"
    if key.expires:
        return f"{'expired' if key.expires < time.time() else 'until'} {_day(key.expires)}"
    return "active"


def _day(moment: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment else "-"
