"""`kvmesh orgs`: list, create, suspend, resume, forget."""

from __future__ import annotations

import argparse
import json

from kvmesh.v1 import iam_pb2, iam_pb2_grpc, pages_pb2, pages_pb2_grpc

from mesh.cli.iam import CALL_TIMEOUT_S, as_operator, at_every_store
from mesh.cli.style import table


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        return _list(arguments)
    if arguments.action == "forget":
        return _forget(arguments)
    request = iam_pb2.PutOrganisationRequest(id=arguments.id, suspended=arguments.action == "suspend")

    async def put(admin: iam_pb2_grpc.AdminAsyncStub) -> None:
        await admin.PutOrganisation(request, timeout=CALL_TIMEOUT_S)

    as_operator(arguments.state, put)
    print(f"{arguments.id}: {'suspended' if request.suspended else 'active'}")
    return 0


def _forget(arguments: argparse.Namespace) -> int:
    request = pages_pb2.ForgetRequest(organisation=arguments.id)

    async def forget(pages: pages_pb2_grpc.PagesAsyncStub) -> None:
        await pages.Forget(request, timeout=CALL_TIMEOUT_S)

    stores = at_every_store(arguments.state, forget)
    print(f"{arguments.id}: no page of its prompts is kept any more by {', '.join(stores)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    async def listed(admin: iam_pb2_grpc.AdminAsyncStub) -> iam_pb2.ListOrganisationsResponse:
        return await admin.ListOrganisations(iam_pb2.ListOrganisationsRequest(), timeout=CALL_TIMEOUT_S)

    found = as_operator(arguments.state, listed).organisations
    if arguments.json:
        print(json.dumps([{"id": org.id, "suspended": org.suspended} for org in found], indent=1))
    else:
        print(table([(org.id, "suspended" if org.suspended else "active") for org in found], ("ID", "STATE")))
    return 0
