"""Everything a credential check needs, in memory, and the policy that routers watch.

**What a snapshot means.** Organisation o may use model m with credential c if and
only if

1. o is in `organisations` and is not suspended,
2. c is not in `revoked` and the identity token that names it has not expired,
3. m is in `models` (the catalogue),
4. the token's own `models` limit is null or contains m,
5. no grant (o, m, DENY) or (o, "*", DENY) exists, and
6. a grant (o, m, ALLOW) or (o, "*", ALLOW) exists.

Nothing is allowed by default and deny always wins. Listing models and calling one
must use the same rule, and a forbidden model looks like an unknown one. A grant may
name a model that the catalogue lacks: it allows nothing until the model is there.

`version` grows with every change and orders snapshots of one database. `revoked`
holds credentials that ended within the last hour: identity tokens live 60 s at
most, so an older one cannot be in use any more. A router that cannot reach IAM
decides from the snapshot it has.

**How it stays true.** The process that writes refreshes its own directory before it
answers. Another process that shares the database learns of the change by the
`iam.policy` hint, and without NATS by the check it makes on use: when a second has
passed since the last look, the next credential waits for one read of the version.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from iam_authz import tables
from iam_authz.database import Database
from iam_authz.records import ApiKey, CatalogueModel, Grant, Organisation

REVOKED_KEPT_S = 3_600
FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of the policy; see the module's text for what it means."""

    version: int
    organisations: tuple[Organisation, ...] = ()
    models: tuple[CatalogueModel, ...] = ()
    grants: tuple[Grant, ...] = ()
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Delta:
    version: int
    whole: bool
    organisations: list[Organisation]
    models: list[CatalogueModel]
    grants: list[Grant]
    keys: list[ApiKey]
    denied: dict[str, int]


class Directory:
    """Lookups are dictionary reads on the event loop; only `refresh` touches the database."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.time,
        fresh_s: float = FRESH_S,
    ) -> None:
        self._database = database
        self._clock = clock
        self._fresh_s = fresh_s
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._keys: dict[str, ApiKey] = {}
        self._ending: dict[str, ApiKey] = {}
        self._denied: dict[str, int] = {}
        self._organisations: dict[str, Organisation] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self.snapshot = Snapshot(version=0)

    def key(self, key_id: str) -> ApiKey | None:
        """The key of a public id."""
        return self._keys.get(key_id)

    def organisation(self, organisation: str) -> Organisation | None:
        """The organisation of an id."""
        return self._organisations.get(organisation)

    def denied(self, credential: str) -> bool:
        """Whether a bearer token was revoked."""
        return credential in self._denied

    @property
    def stale(self) -> bool:
        """Whether `ensure_fresh` would have to look."""
        return time.monotonic() - self._looked >= self._fresh_s

    async def ensure_fresh(self) -> None:
        """Waits for a look at the database's version, if the last one is too long ago."""
        if not self.stale:
            return
        if self._looking is None:
            self._looking = asyncio.create_task(self.refresh())
            self._looking.add_done_callback(self._looked_up)
        # One look serves all who wait, and outlives each of them.
        await asyncio.shield(self._looking)

    async def refresh(self) -> None:
        """Takes in what has changed in the database, whoever changed it."""
        since = self.snapshot.version
        asked = time.monotonic()
        delta = await self._database.read(lambda connection: _load(connection, since))
        self._looked = max(self._looked, asked)
        if delta is not None and (delta.whole or delta.version > self.snapshot.version):
            self._apply(delta)

    async def watch(self) -> AsyncIterator[Snapshot]:
        """The policy as it is, then each newer one; versions may be skipped. Ends with `close`."""
        seen: Snapshot | None = None
        while not self._closed:
            if self.snapshot is not seen:
                seen = self.snapshot
                yield seen
            else:
                await self._changed.wait()

    def close(self) -> None:
        """Ends all watches, so that their callers turn to another IAM."""
        self._closed = True
        self._changed.set()

    def _looked_up(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        if not task.cancelled():
            task.exception()  # whoever waits gets it too; with nobody waiting it is not news

    def _apply(self, delta: _Delta) -> None:
        if delta.whole:
            self._keys.clear()
            self._ending.clear()
        for key in delta.keys:
            self._keys[key.id] = key
            if key.revoked or key.expires:
                self._ending[key.id] = key
        self._denied = delta.denied
        self._organisations = {organisation.id: organisation for organisation in delta.organisations}
        self.snapshot = Snapshot(
            version=delta.version,
            organisations=tuple(delta.organisations),
            models=tuple(delta.models),
            grants=tuple(delta.grants),
            revoked=self._revoked(),
        )
        # Wake all who wait now; those who come later wait for the next change.
        self._changed.set()
        if not self._closed:
            self._changed = asyncio.Event()

    def _revoked(self) -> tuple[str, ...]:
        now = self._clock()
        recent = now - REVOKED_KEPT_S
        names = {name for name, revoked in self._denied.items() if revoked >= recent}
        for key in self._ending.values():
            # A revocation counts at once, whatever another machine's clock says.
            if key.revoked >= recent or recent <= key.expires <= now:
                names.add(key.id)
        return tuple(sorted(names))


def _load(connection: sqlite3.Connection, since: int) -> _Delta | None:
    version = tables.policy_version(connection)
    if version == since:
        return None
    # A version that went back means another database (a restored backup).
    whole = version < since
    return _Delta(
        version=version,
        whole=whole,
        organisations=tables.organisations(connection),
        models=tables.models(connection),
        grants=tables.grants(connection),
        keys=tables.keys_changed_since(connection, 0 if whole else since),
        denied=tables.denied_tokens(connection),
    )
