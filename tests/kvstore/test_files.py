"""The files of an arena: where they lie, what a next store takes up, and what it does not."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import files as arena_files
from kvstore.files import ArenaFiles, ArenaKey, create_files, find_files
from kvstore.options import StoreOptions, store_options
from kvstore.store import PAGES_LIMIT, Store
from kvstore.table import PageRecord, PageState
from mesh.config import ConfigError
from mesh.errors import OutOfPages
from mesh.kv.header_file import record_offset
from mesh.kv.page import CommitItem
from mesh.supervisor.sweep import SHARED_MEMORY, remove_arenas
from tests.kvstore.node import FINGERPRINT, LAYOUT

KEY = ArenaKey("tiny", FINGERPRINT, LAYOUT.digest())


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    remove_arenas(tmp_path)


def create(state: Path, pages: int = 4) -> ArenaFiles:
    return create_files(state, KEY, str(LAYOUT), pages, 2048)


def test_what_was_written_is_read_again(state: Path) -> None:
    files = create(state)
    assert files.pages_path.parent == SHARED_MEMORY
    assert os.stat(files.pages_path).st_blocks * 512 >= 4 * 2048, "the memory exists"
    files.write(PageRecord(1, PageState.LEASED, 7, 0, b"b" * 16, b"p" * 16, 99))
    files.write(PageRecord(2, PageState.GRANTED, 3, owner=42))
    files.write(PageRecord(3, PageState.LEASED, 5, 0, b"c" * 16, b"p" * 16, condemned=True))
    (again,) = find_files(state)
    assert (again.key, again.pages, again.page_bytes, again.layout) == (KEY, 4, 2048, str(LAYOUT))
    records = list(again.read())
    assert records[0] == PageRecord(0)
    assert records[1] == PageRecord(1, PageState.LEASED, 7, 0, b"b" * 16, b"p" * 16, 99)
    assert records[2] == PageRecord(2, PageState.GRANTED, 3, owner=42)
    assert (records[3].state, records[3].owner) == (PageState.QUARANTINED, 0), "nobody's, never served"


def test_a_half_written_record_is_nobodys(state: Path) -> None:
    files = create(state)
    files.write(PageRecord(1, PageState.LEASED, 7, 0, b"b" * 16, b"p" * 16, 99))
    with files.headers_path.open("r+b") as headers:
        headers.seek(record_offset(1) + 40)
        headers.write(b"torn")
    (again,) = find_files(state)
    record = list(again.read())[1]
    assert (record.state, record.owner, record.block_id) == (PageState.QUARANTINED, 0, b"")
    assert record.generation > 7


@pytest.mark.parametrize("damage", ["magic", "short", "pages gone", "pages short", "not json"])
def test_files_that_make_no_sense_are_removed(state: Path, damage: str) -> None:
    files = create(state)
    with files.headers_path.open("r+b") as headers:
        if damage == "magic":
            headers.write(b"KVMHDR99")
        elif damage == "short":
            headers.truncate(100)
        elif damage == "not json":
            headers.seek(struct.calcsize("<8sIQI"))
            headers.write(b"????")
    if damage == "pages gone":
        files.pages_path.unlink()
    elif damage == "pages short":
        os.truncate(files.pages_path, 2048)
    assert list(find_files(state)) == []
    assert not files.headers_path.exists()
    assert not files.pages_path.exists()


def test_too_small_a_shared_memory_means_the_state_directory_and_a_warning(
    state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_files, "_free_bytes", lambda directory: 4096)
    with caplog.at_level(logging.WARNING):
        files = create(state)
    assert files.pages_path.parent == state / "shm"
    assert "has no room" in caplog.text
    (again,) = find_files(state)
    assert again.pages_path == files.pages_path
    assert len(remove_arenas(state)) == 2, "the supervisor's sweep knows the names"


def test_options_are_strict() -> None:
    assert store_options({"kv_bytes": 5}) == StoreOptions(5)
    assert store_options({"kv_bytes": 5, "models": 2, "page_pool": 9, "debug_fill": True}) == StoreOptions(
        5, 2, 9, True
    )
    for wrong in ({}, {"kv_bytes": 0}, {"kv_bytes": True}, {"kv_bytes": 5, "debug_fill": 1}, {"kv_byte": 5}):
        with pytest.raises(ConfigError):
            store_options(wrong)


async def test_arenas_share_one_budget(state: Path) -> None:
    store = Store(state, StoreOptions(kv_bytes=16 * 2048, models=2))
    await store.start()
    try:
        first = await store.attach("w0", "a", FINGERPRINT, LAYOUT)
        second = await store.attach("w1", "b", FINGERPRINT, LAYOUT)
        assert [s.arena.files.pages for s in (first, second)] == [8, 8]
        same = await store.attach("w2", "a", FINGERPRINT, LAYOUT)
        assert same.arena is first.arena
        store.leave(second, clean=True)
        third = await store.attach("w3", "c", FINGERPRINT, LAYOUT)
        assert third.arena.files.pages == 8
        assert [k.model for k in store.arenas] == ["a", "c"], "an arena nobody uses makes room"
    finally:
        store.end_sessions()
        for session in (first, same, third):
            store.leave(session, clean=True)
        await store.close()
    assert list(find_files(state)) == []
    toy = replace(LAYOUT, page_bytes=2048, page_tokens=1)
    large = Store(state, StoreOptions(kv_bytes=2048 * (PAGES_LIMIT + 5)))
    session = await large.attach("w0", "toy", FINGERPRINT, toy)
    assert session.arena.files.pages == PAGES_LIMIT
    large.leave(session, clean=True)
    await large.close()
    small = Store(state, StoreOptions(kv_bytes=2047))
    with pytest.raises(OutOfPages, match="one page of 2048"):
        await small.attach("w0", "a", FINGERPRINT, LAYOUT)


async def test_a_next_store_takes_up_every_arena(state: Path) -> None:
    store = Store(state, StoreOptions(kv_bytes=16 * 2048, models=2))
    for model in ("a", "b"):
        session = await store.attach(f"w-{model}", model, FINGERPRINT, LAYOUT)
        (page,) = await store.grant(session, 1, partial=False)
        files = session.arena.files
        files.page(page.index)[:] = bytes(2048)
        await store.commit(session, "x", [CommitItem(page, model.encode() * 16, b"r" * 16)], 0)
    following = Store(state, StoreOptions(kv_bytes=16 * 2048, models=2))
    await following.start()
    assert following.lookup("a", FINGERPRINT, [[b"a" * 16]]) == [1]
    assert following.lookup("b", b"", [[b"b" * 16]]) == [1]
    assert following.lookup("a", b"", [[b"b" * 16]]) == [0]
    sequence, blocks = following.blocks("a", FINGERPRINT)
    assert blocks == [b"a" * 16]
    assert sequence > store.events.sequence - 1
