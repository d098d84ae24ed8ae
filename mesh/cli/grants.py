"""`kvmesh grants`: allow, deny, remove."""

from __future__ import annotations

import argparse

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from mesh.cli.failure import Failure
from mesh.cli.iam import CALL_TIMEOUT_S, as_operator

_EFFECTS = {"allow": iam_pb2.GRANT_EFFECT_ALLOW, "deny": iam_pb2.GRANT_EFFECT_DENY}


def run(arguments: argparse.Namespace) -> int:
    if arguments.action is None:
        raise Failure("grants: say allow, deny or remove (see 'kvmesh grants --help')", status=2)
    org, model = arguments.org, arguments.model

    async def change(admin: iam_pb2_grpc.AdminAsyncStub) -> None:
        if arguments.action == "remove":
            request = iam_pb2.RemoveGrantRequest(organisation=org, model=model)
            await admin.RemoveGrant(request, timeout=CALL_TIMEOUT_S)
        else:
            grant = iam_pb2.Grant(organisation=org, model=model, effect=_EFFECTS[arguments.action])
            await admin.PutGrant(iam_pb2.PutGrantRequest(grant=grant), timeout=CALL_TIMEOUT_S)

    as_operator(arguments.state, change)
    done = {"allow": "may use", "deny": "is denied", "remove": "has no grant of its own for"}[
        arguments.action
    ]
    print(f"{org} {done} {model}")
    return 0
