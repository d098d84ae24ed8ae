"""Envoy's question about every request: who is this? (`ext_authz`, no body.)

Allowed: the identity token is put in `x-mesh-identity` in place of whatever was
there; `authorization`, `x-api-key` and every other `x-mesh-*` header of the client are removed.
Refused: an error body as OpenAI sends it (gRPC clients get message and typed detail),
which Envoy passes on. It says *who*, never *what*: the router decides that.
"""

from __future__ import annotations

import json
import logging
import time
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import grpc
from kvmesh.extern import ext_authz_pb2 as pb
from kvmesh.extern import ext_authz_pb2_grpc

from iam_authz.authenticate import Authenticator, Refusal
from iam_authz.identity import IdentityMint, request_id_of
from iam_authz.metrics import IamMetrics
from mesh.errors import MeshError, to_status

log = logging.getLogger(__name__)

IDENTITY_HEADER = "x-mesh-identity"
MESH_PREFIX = "x-mesh-"
# Where clients of the messages dialect put their API key.
KEY_HEADER = "x-api-key"
MESSAGES_PATH = "/v1/messages"
# Set by Envoy itself for the next hop.
EDGE_HEADERS = frozenset({"x-mesh-service", "x-mesh-start"})

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class CheckServicer(ext_authz_pb2_grpc.AuthorizationServicer):
    """`envoy.service.auth.v3.Authorization`."""

    def __init__(self, authenticator: Authenticator, mint: IdentityMint, metrics: IamMetrics) -> None:
        self._authenticator = authenticator
        self._mint = mint
        self._metrics = metrics

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        began = time.perf_counter()
        headers = request.attributes.request.http.headers
        request_id = request_id_of(headers.get("x-request-id"))
        try:
            caller = await self._authenticator.authenticate(_authorization(headers))
            response = _allowed(self._mint.mint(caller, request_id), headers)
            outcome: str = "allowed"
        except Refusal as refusal:
            outcome = refusal.outcome
            response = _refused(refusal.error, request_id, headers, request.attributes.request.http.path)
            log.info(
                "credential refused",
                extra={"request_id": request_id, "outcome": outcome, "credential": refusal.credential},
            )
        self._metrics.checked("edge", outcome, time.perf_counter() - began)
        return response


def _authorization(headers: Mapping[str, str]) -> str | None:
    # Envoy sends lower-case names, once each; anything else must not slip through.
    values = [value for name, value in headers.items() if name.lower() == "authorization"]
    # Two credentials are none, unless they are the same: nobody has to know which one counts.
    keys = [f"Bearer {value}" for name, value in headers.items() if name.lower() == KEY_HEADER]
    values += [key for key in keys if key not in values]
    return None if not values else ",".join(values)


def _allowed(token: str, headers: Mapping[str, str]) -> pb.CheckResponse:
    removed = ["authorization"]
    for name in headers:
        lower = name.lower()
        ours = lower == IDENTITY_HEADER or lower in EDGE_HEADERS
        if lower == KEY_HEADER or (lower.startswith(MESH_PREFIX) and not ours):
            removed.append(name)
    return pb.CheckResponse(
        status=pb.Status(code=0),
        ok_response=pb.OkHttpResponse(
            headers=[_header(IDENTITY_HEADER, token)],
            headers_to_remove=removed,
        ),
    )


def _refused(error: MeshError, request_id: str, headers: Mapping[str, str], path: str) -> pb.CheckResponse:
    answer = [_header("x-request-id", request_id)]
    if error.http_status == 401:
        answer.append(_header("www-authenticate", "Bearer"))
    if error.retry_after_s is not None:
        answer.append(_header("retry-after", str(max(1, round(error.retry_after_s)))))
    body = error.message
    if headers.get("content-type", "").startswith("application/grpc"):
        answer += [_header(key, b64encode(value).decode()) for key, value in to_status(error).trailing]
    else:
        answer.append(_header("content-type", "application/json"))
        body = messages_body(error, request_id) if path.startswith(MESSAGES_PATH) else error_body(error)
    return pb.CheckResponse(
        status=pb.Status(code=error.grpc_status.value[0], message=error.message),
        denied_response=pb.DeniedHttpResponse(
            status=pb.HttpStatus(code=error.http_status), headers=answer, body=body
        ),
    )


def error_body(error: MeshError) -> str:
    """The error as OpenAI sends it: a wrong key has the type of an invalid request there."""
    kind = (
        "invalid_request_error" if error.grpc_status is grpc.StatusCode.UNAUTHENTICATED else error.openai_type
    )
    content = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": content})


def messages_body(error: MeshError, request_id: str) -> str:
    """The error as clients of the messages dialect know it."""
    kinds = {401: "authentication_error", 403: "permission_error", 503: "overloaded_error"}
    content = {"type": kinds.get(error.http_status, "api_error"), "message": error.message}
    return json.dumps({"type": "error", "error": content, "request_id": request_id})


def _header(name: str, value: str) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(header=pb.HeaderValue(key=name, value=value), append_action=_OVERWRITE)
