"""Quota for routers."""

from __future__ import annotations

from typing import Any

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz.quota import Quotas


class QuotaServicer(iam_pb2_grpc.QuotaServicer):
    """`kvmesh.v1.Quota`."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    async def Lease(self, request: iam_pb2.QuotaLeaseRequest, context: Any) -> iam_pb2.QuotaLeaseResponse:
        lease = self._quotas.lease(request.organisation, request.model, request.tokens)
        return iam_pb2.QuotaLeaseResponse(
            lease_id=lease.id, tokens=lease.tokens, expires_in_s=lease.expires_in_s
        )

    async def Settle(self, request: iam_pb2.SettleRequest, context: Any) -> iam_pb2.SettleResponse:
        self._quotas.settle(request.lease_id, request.request_id, request.tokens)
        return iam_pb2.SettleResponse()
