"""The server's doorkeeper: who may call which method.

Everything is refused unless a rule names the method and the caller's role; only
`grpc.health.v1.Health` is open. A caller shows a service token, over Unix sockets
as well; under TLS the certificate of the connection must name the same service.
A method that does not exist is refused the same way before it is called unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

import grpc.aio

from mesh.ca import service_uri
from mesh.errors import PermissionDenied, Unauthenticated
from mesh.identity import TokenVerifier, VerifiedToken, service_audience

SERVICE_TOKEN_KEY = "x-mesh-service"
TRACEPARENT_KEY = "traceparent"

HEALTH_PREFIX = "/grpc.health.v1.Health/"
REFLECTION_PREFIXES = ("/grpc.reflection.v1alpha.ServerReflection/", "/grpc.reflection.v1.ServerReflection/")
OPERATOR_ROLE = "operator"

# Set for the task that runs the handler, so it needs no place on gRPC's own context object.
current_caller: ContextVar[VerifiedToken | None] = ContextVar("kvmesh_caller", default=None)


def caller(context: Any) -> VerifiedToken:
    """Who called the rpc that is being handled. `context` is the servicer's context."""
    del context
    token = current_caller.get()
    if token is None:
        raise Unauthenticated("no mesh caller here", code="invalid_mesh_token")
    return token


class Doorkeeper:
    """Decides on one server's calls.

    `allowed` maps a full method (`/kvmesh.v1.Pages/Stats`) or a service prefix
    (`/kvmesh.v1.Pages/`) to the roles that may call it; the full method wins.
    """

    def __init__(
        self, verifier: TokenVerifier, *, role: str, allowed: Mapping[str, Collection[str]], tls: bool
    ) -> None:
        for key in allowed:
            if not key.startswith("/") or key.count("/") != 2:
                raise ValueError(f"not a method or a service prefix: {key}")
        self._verifier = verifier
        self._audience = service_audience(role)
        self._allowed = {key: frozenset(roles) for key, roles in allowed.items()}
        for prefix in REFLECTION_PREFIXES:
            self._allowed.setdefault(prefix, frozenset({OPERATOR_ROLE}))
        self._tls = tls

    @staticmethod
    def exempt(method: str) -> bool:
        """True for the methods that anyone may call."""
        return method.startswith(HEALTH_PREFIX)

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> VerifiedToken:
        """The caller, or Unauthenticated (nobody we know) or PermissionDenied (not this method)."""
        token = ""
        for key, value in context.invocation_metadata() or ():
            if key == SERVICE_TOKEN_KEY:
                if token or not isinstance(value, str):
                    raise Unauthenticated("more than one service token", code="invalid_mesh_token")
                token = value
        if not token:
            raise Unauthenticated("this method needs a service token", code="invalid_mesh_token")
        verified = self._verifier.verify(token, audience=self._audience, roles=_Any)
        if self._tls:
            self._match_peer(verified, context)
        roles = self._allowed.get(method)
        if roles is None:
            roles = self._allowed.get(method[: method.rfind("/") + 1], frozenset())
        if verified.role not in roles:
            raise PermissionDenied(f"a service of role {verified.role} may not call {method}")
        return verified

    @staticmethod
    def _match_peer(verified: VerifiedToken, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if service_uri(verified.role, verified.name).encode() not in names:
            raise Unauthenticated(
                "the token is not of the service that holds the certificate", code="invalid_mesh_token"
            )


class _Everyone(Collection[str]):
    """Every role: the method's own rule decides afterwards."""

    def __contains__(self, role: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


_Any = _Everyone()
