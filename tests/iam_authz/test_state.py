"""What lies on disk: who may read it, what it holds, and what happens when it is damaged."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kvmesh.v1 import iam_pb2

from iam_authz import audit, schema, tables
from iam_authz.database import Database
from iam_authz.last_used import LastUsed
from iam_authz.pepper import Pepper, PepperError
from mesh.errors import Unavailable
from tests.iam_authz.world import World, running_iam


def files(state: Path) -> list[Path]:
    return [path for path in (state / "iam").iterdir() if path.is_file()]


async def test_only_the_owner_may_read_the_state(world: World) -> None:
    await world.organisation()
    folder = world.state / "iam"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in files(world.state)}
    assert {"iam.db", "iam.db-wal", "pepper"} <= names
    for path in files(world.state):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_no_key_lies_on_disk(world: World) -> None:
    await world.organisation()
    secrets = [(await world.key()).secret for _ in range(3)]
    for secret in secrets:
        await world.check(f"Bearer {secret}")
    await world.iam.last_used.flush()
    content = b"".join(path.read_bytes() for path in files(world.state))
    for secret in secrets:
        public_id, private = secret.split("_")[1:]
        assert public_id.encode() in content
        assert private.encode() not in content
        assert private[:20].encode() not in content


async def test_everything_survives_a_restart(tmp_path: Path) -> None:
    async with running_iam(tmp_path) as first:
        await first.organisation()
        created, revoked = await first.key(), await first.key()
        await first.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=revoked.key.id))
        snapshot = first.iam.directory.snapshot
    async with running_iam(tmp_path) as second:
        assert second.iam.directory.snapshot == snapshot
        assert (await second.check(f"Bearer {created.secret}")).status.code == 0
        assert (await second.check(f"Bearer {revoked.secret}")).status.code != 0


async def test_use_is_noted_to_the_minute_and_in_batches(world: World) -> None:
    await world.organisation()
    created = await world.key()

    async def last_used() -> int:
        return (await world.admin.ListKeys(iam_pb2.ListKeysRequest())).keys[0].last_used

    version = world.iam.directory.snapshot.version
    for _ in range(20):
        await world.check(f"Bearer {created.secret}")
    assert await last_used() == 0
    await world.iam.last_used.flush()
    used = await last_used()
    assert used % 60 == 0
    assert 0 <= created.key.created - used < 60
    assert world.iam.directory.snapshot.version == version


async def test_use_is_written_by_itself_and_one_timer_serves_many(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "iam.db")
    writes = []
    wrote = asyncio.Event()
    write = database.write

    async def counted(change: object) -> None:
        writes.append(change)
        await write(change)  # type: ignore[arg-type]
        wrote.set()

    database.write = counted  # type: ignore[method-assign, assignment]
    noted = LastUsed(database, write_after_s=0.01)
    for number in range(100):
        noted.note(f"k{number % 10}", 0, 1_000_020.0 + number % 30)
    await asyncio.wait_for(wrote.wait(), 2)
    noted.note("k1", 0, 1_000_020.0 + 5)
    await noted.flush()
    assert len(writes) == 1, "the same minute is not written twice"
    noted.note("k1", 0, 1_000_020.0 + 65)
    await noted.flush()
    assert len(writes) == 2
    await database.close()


async def test_a_lost_or_foreign_pepper_is_named(tmp_path: Path) -> None:
    async with running_iam(tmp_path) as world:
        await world.organisation()
    pepper = tmp_path / "iam" / "pepper"
    right = pepper.read_bytes()
    pepper.unlink()
    with pytest.raises(PepperError, match="missing"):
        async with running_iam(tmp_path):
            pass
    assert not pepper.exists(), "a new pepper would silently kill every key"
    pepper.write_bytes(bytes(32))
    pepper.chmod(0o600)
    with pytest.raises(PepperError, match="not the one"):
        async with running_iam(tmp_path):
            pass
    pepper.write_bytes(right)
    pepper.chmod(0o644)
    with pytest.raises(PepperError, match="chmod 600"):
        async with running_iam(tmp_path):
            pass


async def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    async with running_iam(tmp_path):
        pass
    connection = sqlite3.connect(tmp_path / "iam" / "iam.db")
    connection.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(schema.SchemaError, match="newer kvmesh"):
        async with running_iam(tmp_path):
            pass


async def test_a_database_of_every_earlier_schema_is_brought_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await Database.open(tmp_path / "iam.db")
    await first.close()
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE later (x INTEGER) STRICT;"))
    database = await Database.open(tmp_path / "iam.db")
    assert await database.read(lambda c: c.execute("SELECT count(*) FROM later").fetchone()) == (0,)
    await database.close()
    # A migration that fails leaves nothing behind.
    monkeypatch.setattr(
        schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE half (x INTEGER) STRICT;\nNOT SQL;")
    )
    with pytest.raises(sqlite3.Error):
        await Database.open(tmp_path / "iam.db")
    connection = sqlite3.connect(tmp_path / "iam.db")
    assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchone() is None
    connection.close()


async def test_the_audit_trail_cannot_be_changed_unnoticed(world: World) -> None:
    for number in range(4):
        await world.organisation(f"o{number}", allow=None)
    pepper = Pepper.load(world.state / "iam" / "pepper", create=False)
    trail = await world.iam.registry.audit_trail()
    assert audit.first_break(trail, pepper) is None
    changed = [*trail]
    changed[1] = replace(changed[1], target="other")
    assert audit.first_break(changed, pepper) == 2
    assert audit.first_break([trail[0], *trail[2:]], pepper) == 2
    assert audit.first_break([trail[1], trail[0], *trail[2:]], pepper) == 1
    assert audit.first_break(trail, Pepper(bytes(32))) == 1
    connection = sqlite3.connect(world.state / "iam" / "iam.db")
    for statement in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


async def test_the_database_has_one_thread_and_transactions_are_whole(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "iam.db")
    names = await asyncio.gather(
        *(database.read(lambda connection: threading.current_thread().name) for _ in range(20))
    )
    assert len(set(names)) == 1
    assert names[0] != threading.current_thread().name

    def broken(connection: sqlite3.Connection) -> None:
        tables.next_policy_version(connection)
        raise KeyError("later")

    with pytest.raises(KeyError):
        await database.write(broken)
    assert await database.read(tables.policy_version) == 1
    with pytest.raises(Unavailable, match="no such table"):
        await database.read(lambda connection: connection.execute("SELECT * FROM absent"))
    await database.close()
    with pytest.raises(Unavailable, match="stopping"):
        await database.read(tables.policy_version)


async def test_a_full_disk_is_told_and_checks_go_on(world: World) -> None:
    await world.organisation()
    created = await world.key()

    def limit(connection: sqlite3.Connection) -> int:
        used = int(connection.execute("PRAGMA page_count").fetchone()[0])
        connection.execute(f"PRAGMA max_page_count = {used}")
        return used

    await world.iam.registry._database.read(limit)

    async def fill() -> None:
        for _ in range(1_000):
            await world.iam.registry.put_organisation("x" * 60, suspended=False, actor="a" * 1_000)

    with pytest.raises(Unavailable, match="full"):
        await fill()
    assert (await world.check(f"Bearer {created.secret}")).status.code == 0


async def test_a_change_takes_effect_though_its_caller_left(world: World) -> None:
    await world.organisation()
    created = await world.key()
    revoking = asyncio.create_task(world.iam.registry.revoke(created.key.id, actor="t"))
    await asyncio.sleep(0)
    revoking.cancel()
    while not world.iam.directory.snapshot.revoked:
        await asyncio.wait_for(world.iam.directory._changed.wait(), 2)
    assert world.iam.directory.snapshot.revoked == (created.key.id,)
