"""Slices of quota. Unlimited for now, with leases that really begin and end.

A lease covers many requests of one organisation and model until it expires; each
request is settled once. Leases live in this process's memory: after a restart a
router finds its lease unknown (`StaleHandle`) and takes a new one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from iam_authz.directory import Directory
from mesh.errors import InvalidRequest, NotFound, Overloaded, PermissionDenied, StaleHandle

LEASE_S = 60.0
# Requests that began under a lease may end long after it.
SETTLE_S = 3_600.0
MAX_LEASES = 100_000
MAX_TOKENS = 2**53


@dataclass(slots=True)
class _Lease:
    ends: float
    settled: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuotaLease:
    """`tokens` may be spent within `expires_in_s` seconds."""

    id: str
    tokens: int
    expires_in_s: float


class Quotas:
    """Gives and settles leases."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        # In order of their end, because all live equally long.
        self._leases: dict[str, _Lease] = {}

    def lease(self, organisation: str, model: str, tokens: int) -> QuotaLease:
        """All that was asked for. Raises NotFound, PermissionDenied or InvalidRequest."""
        known = self._directory.organisation(organisation)
        if known is None:
            raise NotFound(
                "There is no such organisation.", code="organisation_not_found", param="organisation"
            )
        if known.suspended:
            raise PermissionDenied("This organisation is suspended.", code="organisation_suspended")
        if not model:
            raise InvalidRequest("A lease is for one model.", param="model")
        if not 0 < tokens <= MAX_TOKENS:
            raise InvalidRequest(f"tokens must be between 1 and {MAX_TOKENS}.", param="tokens")
        self._forget_ended()
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded("Too many quota leases are open.", retry_after_s=1.0)
        lease_id = secrets.token_urlsafe(16)
        self._leases[lease_id] = _Lease(self._clock() + LEASE_S)
        return QuotaLease(lease_id, tokens, LEASE_S)

    def settle(self, lease_id: str, request_id: str, tokens: int) -> None:
        """What one request really used; again for the same request is no change."""
        if not request_id:
            raise InvalidRequest("A settlement names its request.", param="request_id")
        self._forget_ended()
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleHandle("This quota lease is not known, or ended long ago.", param="lease_id")
        lease.settled.setdefault(request_id, tokens)

    def _forget_ended(self) -> None:
        now = self._clock()
        for lease_id, lease in list(self._leases.items()):
            if lease.ends + SETTLE_S > now:
                break
            del self._leases[lease_id]
