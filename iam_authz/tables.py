"""Rows to records and back: every SQL statement about policy, keys and models.

All functions run on the database's thread, inside the caller's transaction. They
check nothing and audit nothing: `registry.py` does.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping

from iam_authz.records import ApiKey, CatalogueModel, Effect, Grant, Organisation

_KEY_COLUMNS = "id, digest, organisation, name, created, expires, revoked, last_used, models"


def policy_version(connection: sqlite3.Connection) -> int:
    """The version that the database is at."""
    return int(connection.execute("SELECT value FROM meta WHERE name = 'policy_version'").fetchone()[0])


def next_policy_version(connection: sqlite3.Connection) -> int:
    """Moves the version on, because something that others see is about to change."""
    version = policy_version(connection) + 1
    connection.execute("UPDATE meta SET value = ? WHERE name = 'policy_version'", (version,))
    return version


def pepper_fingerprint(connection: sqlite3.Connection) -> bytes | None:
    """Which pepper the keys were hashed with; None before the first start ended."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'pepper'").fetchone()
    return None if row is None else bytes(row[0])


def put_pepper_fingerprint(connection: sqlite3.Connection, fingerprint: bytes) -> None:
    """Binds the database to its pepper."""
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('pepper', ?)", (fingerprint,))


def organisations(connection: sqlite3.Connection) -> list[Organisation]:
    """All, by id."""
    rows = connection.execute("SELECT id, suspended, cache_salt FROM organisations ORDER BY id")
    return [Organisation(row[0], bool(row[1]), row[2]) for row in rows]


def organisation_exists(connection: sqlite3.Connection, organisation: str) -> bool:
    """Whether there is one of that id."""
    query = "SELECT 1 FROM organisations WHERE id = ?"
    return connection.execute(query, (organisation,)).fetchone() is not None


def put_organisation(connection: sqlite3.Connection, organisation: Organisation, created: int) -> None:
    """Creates or updates; the salt of one that exists stays."""
    connection.execute(
        "INSERT INTO organisations VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET suspended = excluded.suspended",
        (organisation.id, organisation.suspended, organisation.cache_salt, created),
    )


def add_key(connection: sqlite3.Connection, key: ApiKey, version: int) -> None:
    """Stores a new key."""
    connection.execute(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            key.id,
            key.digest,
            key.organisation,
            key.name,
            key.created,
            key.expires,
            key.revoked,
            key.last_used,
            json.dumps(key.models),
            version,
        ),
    )


def key(connection: sqlite3.Connection, key_id: str) -> ApiKey | None:
    """One key."""
    row = connection.execute(f"SELECT {_KEY_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
    return None if row is None else _key(row)


def keys(connection: sqlite3.Connection, organisation: str | None) -> list[ApiKey]:
    """All keys of one organisation, or of all, oldest first."""
    where = "" if organisation is None else "WHERE organisation = ?"
    values = () if organisation is None else (organisation,)
    rows = connection.execute(
        f"SELECT {_KEY_COLUMNS} FROM keys {where} ORDER BY organisation, created, id", values
    )
    return [_key(row) for row in rows]


def keys_changed_since(connection: sqlite3.Connection, version: int) -> list[ApiKey]:
    """Keys that were made or revoked after a policy version."""
    rows = connection.execute(f"SELECT {_KEY_COLUMNS} FROM keys WHERE changed > ?", (version,))
    return [_key(row) for row in rows]


def revoke_key(connection: sqlite3.Connection, key_id: str, now: int, version: int) -> None:
    """Ends a key."""
    connection.execute("UPDATE keys SET revoked = ?, changed = ? WHERE id = ?", (now, version, key_id))


def put_last_used(connection: sqlite3.Connection, times: Mapping[str, int]) -> None:
    """Notes when keys were used; not a policy change."""
    connection.executemany(
        "UPDATE keys SET last_used = max(last_used, ?) WHERE id = ?",
        [(time, key_id) for key_id, time in times.items()],
    )


def deny_token(connection: sqlite3.Connection, credential: str, now: int) -> None:
    """Refuses one bearer token from now on."""
    connection.execute("INSERT OR IGNORE INTO denied_tokens VALUES (?, ?)", (credential, now))


def denied_tokens(connection: sqlite3.Connection) -> dict[str, int]:
    """Credential ids of refused bearer tokens, with the time of revocation."""
    return dict(connection.execute("SELECT credential, revoked FROM denied_tokens").fetchall())


def forget_denied_tokens(connection: sqlite3.Connection, before: int) -> None:
    """Drops those revoked before a time at which they have expired by themselves."""
    connection.execute("DELETE FROM denied_tokens WHERE revoked < ?", (before,))


def grants(connection: sqlite3.Connection) -> list[Grant]:
    """All grants."""
    rows = connection.execute("SELECT organisation, model, effect FROM grants ORDER BY organisation, model")
    return [Grant(row[0], row[1], Effect(row[2])) for row in rows]


def put_grant(connection: sqlite3.Connection, grant: Grant) -> None:
    """Sets the effect of one (organisation, model)."""
    connection.execute(
        "INSERT OR REPLACE INTO grants VALUES (?, ?, ?)",
        (grant.organisation, grant.model, grant.effect.value),
    )


def remove_grant(connection: sqlite3.Connection, organisation: str, model: str) -> bool:
    """Whether there was one."""
    query = "DELETE FROM grants WHERE organisation = ? AND model = ?"
    return connection.execute(query, (organisation, model)).rowcount > 0


def models(connection: sqlite3.Connection) -> list[CatalogueModel]:
    """The catalogue, by name."""
    rows = connection.execute("SELECT name, source, created, owned_by FROM models ORDER BY name")
    return [CatalogueModel(*row) for row in rows]


def put_model(connection: sqlite3.Connection, model: CatalogueModel) -> None:
    """Adds a model, or changes where it comes from; its first time of creation stays."""
    connection.execute(
        "INSERT INTO models VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
        "SET source = excluded.source, owned_by = excluded.owned_by",
        (model.name, model.source, model.created, model.owned_by),
    )


def remove_model(connection: sqlite3.Connection, name: str) -> bool:
    """Whether it was there."""
    return connection.execute("DELETE FROM models WHERE name = ?", (name,)).rowcount > 0


def unknown_models(connection: sqlite3.Connection, names: Iterable[str]) -> list[str]:
    """Those names that the catalogue lacks."""
    known = {row[0] for row in connection.execute("SELECT name FROM models")}
    return [name for name in names if name not in known]


def _key(row: tuple[str, bytes, str, str, int, int, int, int, str]) -> ApiKey:
    return ApiKey(*row[:8], models=tuple(json.loads(row[8])))
