"""What the router's capability allows a worker to ask of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.errors import PermissionDenied
from mesh.identity import TokenVerifier

AUDIENCE = "data"
MINTED_BY = frozenset({"router"})


def check_capability(
    verifier: TokenVerifier,
    token: str,
    *,
    handoff_id: str,
    model: str,
    block_ids: Sequence[bytes] | None = None,
) -> str:
    """The organisation that the capability was minted for.

    Raises Unauthenticated for a token that no router signed, PermissionDenied for
    one of another handoff, model or chain. `block_ids` is the chain to be reserved:
    the capability names its last block, which fixes all of it.
    """
    claims = verifier.verify(token, audience=AUDIENCE, roles=MINTED_BY).claims
    if _text(claims.get("handoff")) != handoff_id:
        raise PermissionDenied("the capability is of another handoff", code="foreign_capability")
    if claims.get("model") not in (None, model):
        raise PermissionDenied("the capability is of another model", code="foreign_capability")
    if block_ids:
        last_block = _text(claims.get("last_block"))
        if last_block != block_ids[-1].hex():
            raise PermissionDenied("the capability is of another chain of blocks", code="foreign_capability")
    org = _text(claims.get("org"))
    if not org:
        raise PermissionDenied("the capability names no organisation", code="foreign_capability")
    return org


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
