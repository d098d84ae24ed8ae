"""A slice of an organisation's quota, taken before work starts and settled after it.

Unlimited until quotas are built: the seam is here so that every path that starts
work already passes it. It does not know who counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class QuotaSlice:
    """Tokens that may be spent under `lease_id`."""

    lease_id: str
    tokens: int


class Quota(Protocol):
    """`lease` raises RateLimited when the share is used up."""

    async def lease(self, organisation: str, model: str, tokens: int) -> QuotaSlice: ...
    def settle(self, slice_: QuotaSlice, request_id: str, tokens: int) -> None: ...


class Unlimited:
    """Every lease succeeds and costs no call."""

    async def lease(self, organisation: str, model: str, tokens: int) -> QuotaSlice:
        return QuotaSlice("", tokens)

    def settle(self, slice_: QuotaSlice, request_id: str, tokens: int) -> None:
        return None
