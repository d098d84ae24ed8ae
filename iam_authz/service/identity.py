"""Credential checks for callers that do not come through Envoy."""

from __future__ import annotations

import logging
import time
from typing import Any

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz.authenticate import Authenticator, Refusal
from iam_authz.identity import IdentityMint, request_id_of
from iam_authz.metrics import IamMetrics

log = logging.getLogger(__name__)


class IdentityServicer(iam_pb2_grpc.IdentityServicer):
    """`kvmesh.v1.Identity`: the same decision as Envoy's check, as a plain rpc."""

    def __init__(self, authenticator: Authenticator, mint: IdentityMint, metrics: IamMetrics) -> None:
        self._authenticator = authenticator
        self._mint = mint
        self._metrics = metrics

    async def Authenticate(
        self, request: iam_pb2.AuthenticateRequest, context: Any
    ) -> iam_pb2.AuthenticateResponse:
        """Raises Unauthenticated, PermissionDenied or Unavailable."""
        began = time.perf_counter()
        request_id = request_id_of(request.request_id or None)
        outcome = "allowed"
        try:
            caller = await self._authenticator.authenticate(request.authorization or None)
            return iam_pb2.AuthenticateResponse(identity_token=self._mint.mint(caller, request_id))
        except Refusal as refusal:
            outcome = refusal.outcome
            log.info(
                "credential refused",
                extra={"request_id": request_id, "outcome": outcome, "credential": refusal.credential},
            )
            raise refusal.error from None
        finally:
            self._metrics.checked("rpc", outcome, time.perf_counter() - began)
