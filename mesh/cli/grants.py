"""`kvmesh grants`: list, allow, deny, remove."""

from __future__ import annotations

import argparse
import json

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from mesh.cli.iam import CALL_TIMEOUT_S, as_operator
from mesh.cli.style import table

_EFFECTS = {"allow": iam_pb2.GRANT_EFFECT_ALLOW, "deny": iam_pb2.GRANT_EFFECT_DENY}
_NAMES = {effect: name for name, effect in _EFFECTS.items()}


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        return _list(arguments)
    return _remove(arguments) if arguments.action == "remove" else _put(arguments)


def _list(arguments: argparse.Namespace) -> int:
    request = iam_pb2.ListGrantsRequest(organisation=arguments.org or "")

    async def listed(admin: iam_pb2_grpc.AdminAsyncStub) -> iam_pb2.ListGrantsResponse:
        return await admin.ListGrants(request, timeout=CALL_TIMEOUT_S)

    rows = [(g.organisation, g.model, _NAMES[g.effect]) for g in as_operator(arguments.state, listed).grants]
    if arguments.json:
        print(json.dumps([dict(zip(("organisation", "model", "effect"), row, strict=True)) for row in rows]))
    else:
        print(table(rows, ("ORGANISATION", "MODEL", "EFFECT")))
    return 0


def _put(arguments: argparse.Namespace) -> int:
    org, model = arguments.org, arguments.model
    grant = iam_pb2.Grant(organisation=org, model=model, effect=_EFFECTS[arguments.action])

    async def put(admin: iam_pb2_grpc.AdminAsyncStub) -> iam_pb2.PutGrantResponse:
        return await admin.PutGrant(iam_pb2.PutGrantRequest(grant=grant), timeout=CALL_TIMEOUT_S)

    answer = as_operator(arguments.state, put)
    print(f"{org} {'may use' if arguments.action == 'allow' else 'is denied'} {model}")
    if not answer.in_catalogue:
        print(f"there is no model {model} yet; this holds when there is (see 'kvmesh models')")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    request = iam_pb2.RemoveGrantRequest(organisation=arguments.org, model=arguments.model)

    async def remove(admin: iam_pb2_grpc.AdminAsyncStub) -> None:
        await admin.RemoveGrant(request, timeout=CALL_TIMEOUT_S)

    as_operator(arguments.state, remove)
    print(f"{arguments.org} has no grant of its own for {arguments.model}")
    return 0
