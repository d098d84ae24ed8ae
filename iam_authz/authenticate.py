"""From the value of an Authorization header to a caller, or a refusal.

Accepted: `Bearer <API key>` and `Bearer <JWT>`, once. Nothing is remembered about
a credential between two calls, so nothing can outlive a revocation. Refusals tell
a stranger as little as possible: that a key expired or was revoked is said only to
whoever holds the whole key.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from typing import Literal

from iam_authz.api_key import looks_like_key, parse_key
from iam_authz.bearer import DEFAULT_PROJECT, BearerError, BearerVerifier
from iam_authz.directory import Directory
from iam_authz.last_used import LastUsed
from iam_authz.pepper import Pepper
from iam_authz.records import Caller
from mesh.errors import MeshError, PermissionDenied, Unauthenticated, Unavailable

log = logging.getLogger(__name__)

MAX_AUTHORIZATION_CHARS = 8_192

Outcome = Literal[
    "allowed", "missing", "malformed", "unknown", "expired", "revoked", "token", "suspended", "unavailable"
]

_ABSENT_DIGEST = bytes(32)


class Refusal(Exception):
    """Why a credential was refused: a word for metrics and logs, and what the caller is told."""

    def __init__(self, outcome: Outcome, error: MeshError, credential: str | None = None) -> None:
        super().__init__(error.message)
        self.outcome: Outcome = outcome
        self.error = error
        self.credential = credential


class Authenticator:
    """Answers who a credential stands for."""

    def __init__(
        self,
        directory: Directory,
        pepper: Pepper,
        bearer: BearerVerifier,
        last_used: LastUsed,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._pepper = pepper
        self._bearer = bearer
        self._last_used = last_used
        self._clock = clock

    async def authenticate(self, authorization: str | None) -> Caller:
        """The caller. Raises Refusal."""
        token = _token(authorization)
        try:
            if self._directory.stale:
                await self._directory.ensure_fresh()
            caller = self._key_caller(token) if looks_like_key(token) else await self._token_caller(token)
        except Unavailable as error:
            raise Refusal("unavailable", error) from error
        organisation = self._directory.organisation(caller.organisation)
        if organisation is None or organisation.suspended:
            # A token's issuer may name an organisation that was never made here.
            raise Refusal(
                "suspended",
                PermissionDenied(
                    "This organisation is suspended. Contact its administrator."
                    if organisation is not None
                    else "The organisation of this token is not known here.",
                    code="organisation_suspended" if organisation is not None else "organisation_unknown",
                ),
                caller.credential,
            )
        return caller

    def _key_caller(self, token: str) -> Caller:
        text = parse_key(token)
        if text is None:
            raise _refused("malformed", "Incorrect API key provided: it is damaged or was not copied whole.")
        key = self._directory.key(text.id)
        # The same work whether or not there is such a key.
        digest = self._pepper.key_digest(text.text.encode("ascii"))
        right = hmac.compare_digest(digest, _ABSENT_DIGEST if key is None else key.digest)
        if key is None or not right:
            raise _refused("unknown", "Incorrect API key provided.", text.id)
        now = self._clock()
        if key.revoked:
            raise _refused("revoked", "This API key has been revoked.", key.id)
        if not key.active(now):
            raise _refused("expired", "This API key has expired.", key.id)
        self._last_used.note(key.id, key.last_used, now)
        return Caller(
            organisation=key.organisation,
            project=DEFAULT_PROJECT,
            principal=f"key:{key.id}",
            credential=key.id,
            models=key.models or None,
            expires=float(key.expires) if key.expires else None,
        )

    async def _token_caller(self, token: str) -> Caller:
        try:
            caller = await self._bearer.verify(token)
        except BearerError as error:
            log.info("bearer token refused: %s", error)
            if error.expired:
                raise _refused("expired", "The bearer token has expired.") from error
            raise _refused(
                "token", "The credential is neither an API key nor a valid bearer token."
            ) from error
        if self._directory.denied(caller.credential):
            raise _refused("revoked", "The bearer token has been revoked.", caller.credential)
        return caller


def _token(authorization: str | None) -> str:
    if authorization is None or not authorization.strip():
        raise _refused(
            "missing",
            "You didn't provide an API key. Send it as a header: 'Authorization: Bearer YOUR_KEY'.",
        )
    scheme, _, token = authorization.strip(" \t").partition(" ")
    token = token.strip(" \t")
    if (
        len(authorization) > MAX_AUTHORIZATION_CHARS
        or scheme.lower() != "bearer"
        or not token
        or not token.isascii()
        # Two headers arrive as one with a comma; one credential has neither.
        or any(character in token for character in " ,\t\r\n\0")
    ):
        raise _refused(
            "malformed", "The Authorization header must be one 'Bearer' credential of at most 8 KB."
        )
    return token


def _refused(outcome: Outcome, message: str, credential: str | None = None) -> Refusal:
    return Refusal(outcome, Unauthenticated(message, code="invalid_api_key"), credential)
