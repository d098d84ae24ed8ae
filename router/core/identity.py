"""Who asks: the identity token that IAM minted for this request.

The face has already made sure that the edge speaks (its service token). This
module does not know HTTP or gRPC; it knows which claims make a `Caller`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from mesh.errors import Unauthenticated
from mesh.identity import EDGE_ROLE, service_audience
from router.core.request import Caller

AUDIENCE = "router"
MINTERS = frozenset({"iam"})
EDGE_ROLES = frozenset({EDGE_ROLE})


class Verified(Protocol):
    """What a verified token says: who signed it, and its claims."""

    @property
    def role(self) -> str: ...
    @property
    def claims(self) -> Mapping[str, Any]: ...


class Verifier(Protocol):
    """Checks a token's chain, signature, expiry, audience and signer's role; raises Unauthenticated."""

    def verify(self, token: str, *, audience: str, roles: Collection[str]) -> Verified: ...


def verify_edge(verifier: Verifier, service_token: str | None) -> None:
    """Raises Unauthenticated unless the edge itself sent this."""
    if not service_token:
        raise Unauthenticated("This port answers the edge only.")
    verifier.verify(service_token, audience=service_audience(AUDIENCE), roles=EDGE_ROLES)


def verify_caller(verifier: Verifier, identity_token: str | None, request_id: str) -> Caller:
    """The caller of one request; raises Unauthenticated.

    A token names the request it was made for and is good for no other.
    """
    if not identity_token:
        raise Unauthenticated("This request carries no identity.")
    claims = verifier.verify(identity_token, audience=AUDIENCE, roles=MINTERS).claims
    named = claims.get("request_id")
    if request_id and named and named != request_id:
        raise Unauthenticated("This identity was made for another request.")
    models = claims.get("models")
    if models is not None and not (isinstance(models, list) and all(isinstance(m, str) for m in models)):
        raise Unauthenticated("The identity is not understood.")
    return Caller(
        organisation=_text(claims, "org", required=True),
        project=_text(claims, "project"),
        principal=_text(claims, "principal"),
        credential=_text(claims, "credential", required=True),
        models=None if models is None else frozenset(models),
        request_id=request_id or _text(claims, "request_id", required=True),
    )


def _text(claims: Mapping[str, Any], name: str, *, required: bool = False) -> str:
    value = claims.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        raise Unauthenticated("The identity is not understood.")
    return value
