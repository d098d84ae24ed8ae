"""What operators may ask for. The audit trail names the service identity that asked."""

from __future__ import annotations

from typing import Any

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz import names
from iam_authz.registry import Registry
from iam_authz.service import wire
from iam_authz.usage import UsageLedger
from mesh.errors import InvalidRequest
from mesh.rpc import caller


class AdminServicer(iam_pb2_grpc.AdminServicer):
    """`kvmesh.v1.Admin`. Raises InvalidRequest, NotFound or Unavailable."""

    def __init__(self, registry: Registry, usage: UsageLedger) -> None:
        self._registry = registry
        self._usage = usage

    async def CreateKey(self, request: iam_pb2.CreateKeyRequest, context: Any) -> iam_pb2.CreateKeyResponse:
        key, text = await self._registry.create_key(
            request.organisation,
            request.name,
            expires_in_s=request.expires_in_s if request.HasField("expires_in_s") else None,
            models=list(request.models),
            actor=_actor(context),
        )
        return iam_pb2.CreateKeyResponse(key=wire.key_message(key), secret=text.text)

    async def ListKeys(self, request: iam_pb2.ListKeysRequest, context: Any) -> iam_pb2.ListKeysResponse:
        keys = await self._registry.keys(request.organisation or None)
        return iam_pb2.ListKeysResponse(keys=[wire.key_message(key) for key in keys])

    async def RevokeKey(self, request: iam_pb2.RevokeKeyRequest, context: Any) -> iam_pb2.RevokeKeyResponse:
        await self._registry.revoke(request.id, actor=_actor(context))
        return iam_pb2.RevokeKeyResponse()

    async def PutOrganisation(
        self, request: iam_pb2.PutOrganisationRequest, context: Any
    ) -> iam_pb2.PutOrganisationResponse:
        await self._registry.put_organisation(request.id, suspended=request.suspended, actor=_actor(context))
        return iam_pb2.PutOrganisationResponse()

    async def ListOrganisations(
        self, request: iam_pb2.ListOrganisationsRequest, context: Any
    ) -> iam_pb2.ListOrganisationsResponse:
        found = await self._registry.organisations()
        return iam_pb2.ListOrganisationsResponse(organisations=[wire.organisation_message(o) for o in found])

    async def PutModel(self, request: iam_pb2.PutModelRequest, context: Any) -> iam_pb2.PutModelResponse:
        await self._registry.put_model(wire.model_record(request.model), actor=_actor(context))
        return iam_pb2.PutModelResponse()

    async def RemoveModel(
        self, request: iam_pb2.RemoveModelRequest, context: Any
    ) -> iam_pb2.RemoveModelResponse:
        await self._registry.remove_model(request.name, actor=_actor(context))
        return iam_pb2.RemoveModelResponse()

    async def PutGrant(self, request: iam_pb2.PutGrantRequest, context: Any) -> iam_pb2.PutGrantResponse:
        known = await self._registry.put_grant(wire.grant_record(request.grant), actor=_actor(context))
        return iam_pb2.PutGrantResponse(in_catalogue=known)

    async def RemoveGrant(
        self, request: iam_pb2.RemoveGrantRequest, context: Any
    ) -> iam_pb2.RemoveGrantResponse:
        await self._registry.remove_grant(request.organisation, request.model, actor=_actor(context))
        return iam_pb2.RemoveGrantResponse()

    async def ListGrants(
        self, request: iam_pb2.ListGrantsRequest, context: Any
    ) -> iam_pb2.ListGrantsResponse:
        found = await self._registry.grants(request.organisation or None)
        return iam_pb2.ListGrantsResponse(grants=[wire.grant_message(grant) for grant in found])

    async def ListUsage(self, request: iam_pb2.ListUsageRequest, context: Any) -> iam_pb2.ListUsageResponse:
        if not 0 <= request.since < 2**40:
            raise InvalidRequest("since is a time in Unix seconds.", code="invalid_value", param="since")
        organisation = names.organisation(request.organisation) if request.organisation else None
        found = await self._usage.listed(organisation, request.since)
        return iam_pb2.ListUsageResponse(records=[wire.usage_message(usage) for usage in found])


def _actor(context: Any) -> str:
    return caller(context).name
