"""The audit trail: who changed what, when; append-only and chained.

Each line's digest is keyed (`pepper.py`) and covers the line before, so that a
line that was changed, removed or inserted breaks the chain from there on.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping

from iam_authz.pepper import Pepper
from iam_authz.records import AuditEntry

_START = bytes(32)


def append(
    connection: sqlite3.Connection,
    pepper: Pepper,
    *,
    actor: str,
    action: str,
    target: str,
    detail: Mapping[str, object],
) -> None:
    """Adds a line, in the caller's transaction. `detail` must hold no secret."""
    last = connection.execute("SELECT sequence, digest FROM audit ORDER BY sequence DESC LIMIT 1").fetchone()
    sequence, previous = (1, _START) if last is None else (last[0] + 1, last[1])
    line = (sequence, time.time_ns() // 1_000_000, actor, action, target, json.dumps(detail, sort_keys=True))
    digest = pepper.audit_digest(previous, _bytes(line))
    connection.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", (*line, digest))


def entries(connection: sqlite3.Connection) -> list[AuditEntry]:
    """The whole trail, oldest first."""
    rows = connection.execute(
        "SELECT sequence, time_ms, actor, action, target, detail, digest FROM audit ORDER BY sequence"
    )
    return [AuditEntry(*row) for row in rows]


def first_break(trail: list[AuditEntry], pepper: Pepper) -> int | None:
    """The sequence number of the first line that does not fit, or None if the chain is whole."""
    previous = _START
    for expected, entry in enumerate(trail, start=1):
        line = (entry.sequence, entry.time_ms, entry.actor, entry.action, entry.target, entry.detail)
        digest = pepper.audit_digest(previous, _bytes(line))
        if entry.sequence != expected or digest != entry.digest:
            return expected
        previous = digest
    return None


def _bytes(line: tuple[int, int, str, str, str, str]) -> bytes:
    # JSON of a list keeps the fields apart: no two lines have the same bytes.
    return json.dumps(line, ensure_ascii=True).encode("ascii")
