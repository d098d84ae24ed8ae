"""The things that IAM keeps. Times are Unix seconds; 0 means never."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# Credential ids of bearer tokens begin with this; those of API keys are their public ids.
TOKEN_PREFIX = "jwt_"


class Effect(Enum):
    """What a grant does. Deny wins over allow."""

    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Organisation:
    """`cache_salt` (32 random bytes) keys the root of its block ids; only routers receive it."""

    id: str
    suspended: bool
    cache_salt: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`id` is public. `digest` is a keyed hash; the key itself is never kept.

    `models` limits the key further than its organisation's grants; empty: no limit.
    """

    id: str
    digest: bytes = field(repr=False)
    organisation: str
    name: str
    created: int
    expires: int = 0
    revoked: int = 0
    last_used: int = 0
    models: tuple[str, ...] = ()

    def active(self, now: float) -> bool:
        """Whether it opens anything at `now`."""
        return not self.revoked and (not self.expires or now < self.expires)


@dataclass(frozen=True, slots=True)
class Grant:
    """`model` is a catalogue name or "*"."""

    organisation: str
    model: str
    effect: Effect


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model that the mesh offers, and where its weights come from."""

    name: str
    source: str
    created: int
    owned_by: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request used. `finished_ms` is Unix milliseconds."""

    request_id: str
    organisation: str
    credential: str
    model_asked: str
    model_served: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    outcome: str
    finished_ms: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a credential stands for. `expires` (Unix seconds) is the credential's own end.

    `models` is the credential's own limit; None: all that the organisation may use.
    """

    organisation: str
    project: str
    principal: str
    credential: str
    models: tuple[str, ...] | None
    expires: float | None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit trail; `digest` chains it to the line before."""

    sequence: int
    time_ms: int
    actor: str
    action: str
    target: str
    detail: str
    digest: bytes
