"""The tables, as a list of migrations. A database carries how many it has had.

Migrations are only ever appended. `meta.policy_version` grows with every change
that a router or another IAM process must see; a row of `keys` carries the version
that changed it last, so that only changed keys are read again.
"""

from __future__ import annotations

import sqlite3

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;
    INSERT INTO meta VALUES ('policy_version', 1);
    CREATE TABLE organisations (
        id TEXT PRIMARY KEY,
        suspended INTEGER NOT NULL,
        cache_salt BLOB NOT NULL CHECK (length(cache_salt) = 32),
        created INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        digest BLOB NOT NULL CHECK (length(digest) = 32),
        organisation TEXT NOT NULL REFERENCES organisations (id),
        name TEXT NOT NULL,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        revoked INTEGER NOT NULL,
        last_used INTEGER NOT NULL,
        models TEXT NOT NULL,
        changed INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX keys_changed ON keys (changed);
    CREATE INDEX keys_organisation ON keys (organisation, created);
    CREATE TABLE denied_tokens (
        credential TEXT PRIMARY KEY,
        revoked INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE grants (
        organisation TEXT NOT NULL REFERENCES organisations (id),
        model TEXT NOT NULL,
        effect TEXT NOT NULL CHECK (effect IN ('allow', 'deny')),
        PRIMARY KEY (organisation, model)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE models (
        name TEXT PRIMARY KEY,
        source TEXT NOT NULL,
        created INTEGER NOT NULL,
        owned_by TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE audit (
        sequence INTEGER PRIMARY KEY,
        time_ms INTEGER NOT NULL,
        actor TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        detail TEXT NOT NULL,
        digest BLOB NOT NULL
    ) STRICT;
    CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
    CREATE TRIGGER audit_is_not_deleted BEFORE DELETE ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
    CREATE TABLE usage (
        request_id TEXT NOT NULL,
        organisation TEXT NOT NULL,
        credential TEXT NOT NULL,
        model_asked TEXT NOT NULL,
        model_served TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        finished_ms INTEGER NOT NULL,
        PRIMARY KEY (organisation, request_id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX usage_finished ON usage (finished_ms);
    CREATE INDEX usage_organisation ON usage (organisation, finished_ms);
    """,
)


class SchemaError(Exception):
    """The database is not one that this version can use."""


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the database to the newest schema, or raises SchemaError if it is newer still."""
    if _applied(connection) == len(MIGRATIONS):
        return
    # One writer at a time; another process that starts meanwhile finds the work done.
    connection.execute("BEGIN EXCLUSIVE")
    try:
        done = _applied(connection)
        if done > len(MIGRATIONS):
            raise SchemaError(
                f"the IAM database has schema {done}, this version knows {len(MIGRATIONS)}: "
                "it was written by a newer kvmesh"
            )
        for migration in MIGRATIONS[done:]:
            for statement in _statements(migration):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _applied(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> list[str]:
    # `executescript` would commit first; a migration is all or nothing.
    statements, pending = [], ""
    for line in script.splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements
