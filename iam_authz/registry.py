"""What operators change: organisations, keys, grants and the model catalogue.

Each change is validated, written, audited and given a new policy version in one
transaction, is in this process's directory before the call returns, and is then
announced. `actor` is the name of the service identity that asked. Nothing here
knows gRPC.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from iam_authz import audit, names, tables
from iam_authz.api_key import KeyText, new_key
from iam_authz.database import Database
from iam_authz.directory import Directory
from iam_authz.pepper import Pepper, PepperError
from iam_authz.records import TOKEN_PREFIX, ApiKey, AuditEntry, CatalogueModel, Grant, Organisation
from mesh.errors import InvalidRequest, NotFound

T = TypeVar("T")

# No bearer token is accepted for longer than this, so a denial may be forgotten then.
DENIED_KEPT_S = 400 * 86_400
DEFAULT_OWNER = "kvmesh"


class Registry:
    """The operator's side of IAM."""

    def __init__(
        self,
        database: Database,
        directory: Directory,
        pepper: Pepper,
        *,
        announce: Callable[[int], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._directory = directory
        self._pepper = pepper
        self._announce = announce
        self._clock = clock
        self._changes: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Checks that database and pepper belong together, then fills the directory.

        Raises PepperError when the keys were hashed with another pepper.
        """

        def bind(connection: sqlite3.Connection) -> bytes | None:
            tables.put_pepper_fingerprint(connection, self._pepper.fingerprint)
            return tables.pepper_fingerprint(connection)

        if await self._database.write(bind) != self._pepper.fingerprint:
            raise PepperError("the pepper is not the one that the keys in the database were hashed with")
        await self._directory.refresh()

    async def put_organisation(self, organisation: str, *, suspended: bool, actor: str) -> bool:
        """Creates or updates one; True if it is new. A new one may use nothing yet."""
        names.organisation(organisation, "id")

        def change(connection: sqlite3.Connection) -> bool:
            new = not tables.organisation_exists(connection, organisation)
            record = Organisation(organisation, suspended, secrets.token_bytes(32))
            tables.put_organisation(connection, record, self._now())
            self._note(connection, actor, "organisation.put", organisation, {"suspended": suspended})
            tables.next_policy_version(connection)
            return new

        return await self._change(change)

    async def organisations(self) -> list[Organisation]:
        """All, by id."""
        return await self._database.read(tables.organisations)

    async def create_key(
        self,
        organisation: str,
        name: str,
        *,
        expires_in_s: int | None,
        models: list[str],
        actor: str,
    ) -> tuple[ApiKey, KeyText]:
        """A new key and, this once, its text."""
        names.organisation(organisation)
        names.label(name, "name")
        names.lifetime(expires_in_s)
        limit = names.key_models(models)
        text = new_key()
        now = self._now()
        key = ApiKey(
            id=text.id,
            digest=self._pepper.key_digest(text.text.encode("ascii")),
            organisation=organisation,
            name=name,
            created=now,
            expires=0 if expires_in_s is None else now + expires_in_s,
            models=limit,
        )

        def change(connection: sqlite3.Connection) -> None:
            _require_organisation(connection, organisation)
            unknown = tables.unknown_models(connection, limit)
            if unknown:
                raise InvalidRequest(
                    f"The catalogue has no model {unknown[0]!r}.", code="unknown_model", param="models"
                )
            tables.add_key(connection, key, tables.next_policy_version(connection))
            detail = {"organisation": organisation, "name": name, "expires": key.expires, "models": limit}
            self._note(connection, actor, "key.create", key.id, detail)

        await self._change(change)
        return key, text

    async def keys(self, organisation: str | None) -> list[ApiKey]:
        """The keys of one organisation (NotFound if there is no such), or of all."""

        def query(connection: sqlite3.Connection) -> list[ApiKey]:
            if organisation is not None:
                _require_organisation(connection, organisation)
            return tables.keys(connection, organisation)

        return await self._database.read(query)

    async def revoke(self, credential: str, *, actor: str) -> None:
        """Ends an API key, or one bearer token (`jwt_…`); again is no change."""
        now = self._now()

        def end_key(connection: sqlite3.Connection) -> None:
            key = tables.key(connection, credential)
            if key is None:
                raise NotFound(f"There is no key {credential!r}.", code="key_not_found", param="id")
            if key.revoked:
                return
            tables.revoke_key(connection, credential, now, tables.next_policy_version(connection))
            self._note(connection, actor, "key.revoke", credential, {"organisation": key.organisation})

        def end_token(connection: sqlite3.Connection) -> None:
            tables.forget_denied_tokens(connection, now - DENIED_KEPT_S)
            tables.deny_token(connection, credential, now)
            tables.next_policy_version(connection)
            self._note(connection, actor, "token.revoke", credential, {})

        if not credential or len(credential) > 64 or not credential.isascii():
            raise NotFound("There is no key of that id.", code="key_not_found", param="id")
        await self._change(end_token if credential.startswith(TOKEN_PREFIX) else end_key)

    async def put_model(self, model: CatalogueModel, *, actor: str) -> None:
        """Adds a model to the catalogue, or changes its source."""
        names.model(model.name, "model.name")
        names.label(model.source, "model.source", 1024)
        owner = names.label(model.owned_by or DEFAULT_OWNER, "model.owned_by")
        if model.created < 0:
            raise InvalidRequest(
                "model.created is a time in Unix seconds.", code="invalid_value", param="model.created"
            )
        record = replace(model, created=model.created or self._now(), owned_by=owner)

        def change(connection: sqlite3.Connection) -> None:
            tables.put_model(connection, record)
            tables.next_policy_version(connection)
            self._note(connection, actor, "model.put", record.name, {"source": record.source})

        await self._change(change)

    async def remove_model(self, name: str, *, actor: str) -> None:
        """Takes a model out of the catalogue; its grants stay for when it comes back."""

        def change(connection: sqlite3.Connection) -> None:
            if not tables.remove_model(connection, name):
                raise NotFound(f"The catalogue has no model {name!r}.", code="model_not_found", param="name")
            tables.next_policy_version(connection)
            self._note(connection, actor, "model.remove", name, {})

        await self._change(change)

    async def grants(self, organisation: str | None) -> list[Grant]:
        """The grants of one organisation (NotFound if there is no such), or of all."""

        def query(connection: sqlite3.Connection) -> list[Grant]:
            if organisation is not None:
                _require_organisation(connection, organisation)
            return [g for g in tables.grants(connection) if organisation in (None, g.organisation)]

        return await self._database.read(query)

    async def put_grant(self, grant: Grant, *, actor: str) -> bool:
        """Allows or denies a model, or all ("*"), to an organisation; replaces what was said before.

        False where the catalogue has no such model yet: the grant waits for it.
        """
        names.organisation(grant.organisation, "grant.organisation")
        names.grant_model(grant.model)

        def change(connection: sqlite3.Connection) -> None:
            _require_organisation(connection, grant.organisation)
            tables.put_grant(connection, grant)
            tables.next_policy_version(connection)
            detail = {"model": grant.model, "effect": grant.effect.value}
            self._note(connection, actor, "grant.put", grant.organisation, detail)

        await self._change(change)
        if grant.model == names.ANY_MODEL:
            return True
        return not await self._database.read(lambda c: tables.unknown_models(c, [grant.model]))

    async def remove_grant(self, organisation: str, model: str, *, actor: str) -> None:
        """Takes a grant back; NotFound if there is none."""

        def change(connection: sqlite3.Connection) -> None:
            if not tables.remove_grant(connection, organisation, model):
                raise NotFound(
                    f"Organisation {organisation!r} has no grant for {model!r}.", code="grant_not_found"
                )
            tables.next_policy_version(connection)
            self._note(connection, actor, "grant.remove", organisation, {"model": model})

        await self._change(change)

    async def audit_trail(self) -> list[AuditEntry]:
        """The whole audit trail, oldest first."""
        return await self._database.read(audit.entries)

    async def _change(self, change: Callable[[sqlite3.Connection], T]) -> T:
        task = asyncio.create_task(self._write(change))
        self._changes.add(task)
        task.add_done_callback(self._ended)
        # What is written must take effect even if the caller goes away now.
        return await asyncio.shield(task)

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        def transaction(connection: sqlite3.Connection) -> tuple[T, int | None]:
            before = tables.policy_version(connection)
            result = change(connection)
            after = tables.policy_version(connection)
            return result, after if after != before else None

        result, version = await self._database.write(transaction)
        if version is not None:
            await self._directory.refresh()
            if self._announce is not None:
                await self._announce(version)
        return result

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, unless it went away

    def _note(
        self,
        connection: sqlite3.Connection,
        actor: str,
        action: str,
        target: str,
        detail: Mapping[str, object],
    ) -> None:
        audit.append(connection, self._pepper, actor=actor, action=action, target=target, detail=detail)

    def _now(self) -> int:
        return int(self._clock())


def _require_organisation(connection: sqlite3.Connection, organisation: str) -> None:
    if not tables.organisation_exists(connection, organisation):
        raise NotFound(
            f"There is no organisation {organisation!r}.",
            code="organisation_not_found",
            param="organisation",
        )
