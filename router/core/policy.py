"""May this organisation do this with this model?

A versioned, immutable snapshot and one decision over it. Nothing is allowed
without a grant, deny wins over allow, and a credential may narrow what its
organisation may do. The model list uses the same decision as the call. This
module does not know where snapshots come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.errors import ModelNotFound, PermissionDenied, Unauthenticated
from router.core.request import Caller

EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class Organisation:
    """`salt` keys the root of the organisation's block ids; it never leaves the router."""

    id: str
    suspended: bool
    salt: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model that the mesh knows; `created` in unix seconds."""

    name: str
    source: str
    created: int
    owned_by: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole policy at one version.

    `allowed` and `denied` map an organisation to names of models or `*`.
    """

    version: int
    organisations: Mapping[str, Organisation]
    models: Mapping[str, CatalogueModel]
    allowed: Mapping[str, frozenset[str]]
    denied: Mapping[str, frozenset[str]]
    revoked: frozenset[str]


def not_found(model: str) -> ModelNotFound:
    """One answer for an unknown and for a forbidden model: the catalogue stays private."""
    return ModelNotFound(f"The model `{model}` does not exist or you do not have access to it.")


def admit(snapshot: Snapshot, caller: Caller) -> Organisation:
    """The caller's organisation; raises Unauthenticated or PermissionDenied."""
    if caller.credential in snapshot.revoked:
        raise Unauthenticated("This credential has been revoked.")
    organisation = snapshot.organisations.get(caller.organisation)
    if organisation is None:
        raise PermissionDenied("This organisation is not known.")
    if not organisation.salt:
        raise PermissionDenied("This organisation is not set up yet.")
    if organisation.suspended:
        raise PermissionDenied("This organisation is suspended.", code="organisation_suspended")
    return organisation


def permits(snapshot: Snapshot, caller: Caller, model: str) -> bool:
    """Whether the caller may use a model of the catalogue."""
    if model not in snapshot.models:
        return False
    if caller.models is not None and model not in caller.models and EVERY_MODEL not in caller.models:
        return False
    denied = snapshot.denied.get(caller.organisation, frozenset())
    if model in denied or EVERY_MODEL in denied:
        return False
    allowed = snapshot.allowed.get(caller.organisation, frozenset())
    return model in allowed or EVERY_MODEL in allowed


def decide(snapshot: Snapshot, caller: Caller, model: str) -> tuple[Organisation, CatalogueModel]:
    """The organisation and the model, or why not."""
    organisation = admit(snapshot, caller)
    if not permits(snapshot, caller, model):
        raise not_found(model)
    return organisation, snapshot.models[model]


def visible(snapshot: Snapshot, caller: Caller) -> list[CatalogueModel]:
    """Every model that `decide` would allow, by name."""
    admit(snapshot, caller)
    return [snapshot.models[name] for name in sorted(snapshot.models) if permits(snapshot, caller, name)]
