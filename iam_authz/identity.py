"""The identity token: what the router is told about who makes a request.

Claims: org, project, principal, credential, request_id, models (a list, or null
for all that the organisation may use). Audience `router`; it lives 60 s and never
longer than the credential that it stands for.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from iam_authz.records import Caller
from mesh.identity import ServiceIdentity

AUDIENCE = "router"
TTL_S = 60.0

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(value: str | None) -> str:
    """The edge's request id, or a new one if there is none that can be used."""
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value
    return str(uuid.uuid4())


class IdentityMint:
    """Signs identity tokens with this service's key."""

    def __init__(self, identity: ServiceIdentity, clock: Callable[[], float] = time.time) -> None:
        self._identity = identity
        self._clock = clock

    def mint(self, caller: Caller, request_id: str) -> str:
        """A token for one request of `caller`."""
        ttl_s = TTL_S if caller.expires is None else min(TTL_S, caller.expires - self._clock())
        claims = {
            "org": caller.organisation,
            "project": caller.project,
            "principal": caller.principal,
            "credential": caller.credential,
            "request_id": request_id,
            "models": None if caller.models is None else list(caller.models),
        }
        return self._identity.mint(claims, audience=AUDIENCE, ttl_s=ttl_s)
