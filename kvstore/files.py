"""The two files of an arena: the pages themselves and their headers.

They lie in shared memory where there is room, else in the state directory. The
names begin with what `mesh.supervisor.sweep` removes when a mesh is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvstore.table import PageRecord, PageState
from mesh.kv.header_file import (
    HEAD,
    HEAD_BYTES,
    MAGIC,
    STATE,
    headers_bytes,
    pack_header,
    read_header,
    record_offset,
)
from mesh.supervisor.sweep import SHARED_MEMORY, arena_prefix

log = logging.getLogger(__name__)

PAGES_SUFFIX = ".pages"
HEADERS_SUFFIX = ".headers"


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """What processes must have in common to share pages."""

    model: str
    fingerprint: bytes
    layout_digest: bytes

    def name(self) -> str:
        """A short name for files."""
        digest = blake2b(digest_size=8)
        for part in (self.model.encode(), self.fingerprint, self.layout_digest):
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.hexdigest()


class ArenaFiles:
    """Both files, mapped for reading and writing."""

    def __init__(self, key: ArenaKey, layout: str, pages: int, page_bytes: int, stem: Path) -> None:
        self.key = key
        self.layout = layout
        self.pages = pages
        self.page_bytes = page_bytes
        self.pages_path = stem.with_name(stem.name + PAGES_SUFFIX)
        self.headers_path = stem.with_name(stem.name + HEADERS_SUFFIX)
        self.bytes = _map(self.pages_path, pages * page_bytes)
        self._headers = _map(self.headers_path, headers_bytes(pages))

    def write(self, record: PageRecord) -> None:
        """The whole record of a page. A condemned page is written as nobody's."""
        start = record_offset(record.index)
        if record.condemned:
            packed = pack_header(PageState.QUARANTINED, record.generation, 0, 0, b"", b"")
        else:
            packed = pack_header(
                record.state,
                record.generation,
                record.owner,
                record.checksum,
                record.block_id,
                record.parent_id,
            )
        self._headers[start : start + len(packed)] = packed

    def write_state(self, record: PageRecord) -> None:
        """Only the state of a page."""
        STATE.pack_into(self._headers, record_offset(record.index), record.state)

    def read(self) -> Iterator[PageRecord]:
        """Every record as the file has it; a torn one is quarantined and nobody's."""
        for index in range(self.pages):
            header = read_header(self._headers, index)
            if header.torn or header.state > max(PageState):
                # Above every generation that was ever counted to.
                yield PageRecord(index, PageState.QUARANTINED, time.time_ns())
                continue
            yield PageRecord(
                index,
                PageState(header.state),
                header.generation,
                header.owner,
                header.block_id,
                header.parent_id,
                header.checksum,
            )

    def page(self, index: int) -> memoryview:
        """The bytes of one page."""
        start = index * self.page_bytes
        return memoryview(self.bytes)[start : start + self.page_bytes]

    def close(self) -> None:
        """Unmaps; the files stay."""
        # A hash that is still running in a thread keeps the mapping a little longer.
        with contextlib.suppress(BufferError):
            self.bytes.close()
        self._headers.close()

    def remove(self) -> None:
        """Removes the names. Whoever has mapped the files keeps them."""
        for path in (self.headers_path, self.pages_path):
            path.unlink(missing_ok=True)


def create_files(state_dir: Path, key: ArenaKey, layout: str, pages: int, page_bytes: int) -> ArenaFiles:
    """New files with all pages free. Blocks while the kernel finds the memory: call it in a thread.

    Falls back to the state directory, with a warning, where shared memory is too
    small. Raises OSError if neither has the room.
    """
    name = arena_prefix(state_dir) + key.name()
    size = pages * page_bytes + headers_bytes(pages)
    if _free_bytes(SHARED_MEMORY) > size:
        with contextlib.suppress(OSError):
            return _create(SHARED_MEMORY / name, key, layout, pages, page_bytes)
    directory = state_dir / "shm"
    log.warning(
        "%s has no room for %d bytes: pages go to %s, which is slower", SHARED_MEMORY, size, directory
    )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _create(directory / name, key, layout, pages, page_bytes)


def find_files(state_dir: Path) -> Iterator[ArenaFiles]:
    """The files that an earlier store of this state directory left; unusable ones are removed."""
    prefix = arena_prefix(state_dir)
    for directory in (SHARED_MEMORY, state_dir / "shm"):
        if not directory.is_dir():
            continue
        for headers in sorted(directory.glob(f"{prefix}*{HEADERS_SUFFIX}")):
            stem = headers.with_name(headers.name.removesuffix(HEADERS_SUFFIX))
            try:
                yield _open(stem)
            except (OSError, ValueError, KeyError) as error:
                log.warning("%s cannot be taken up and is removed: %s", stem.name, error)
                headers.unlink(missing_ok=True)
                stem.with_name(stem.name + PAGES_SUFFIX).unlink(missing_ok=True)
        for orphan in sorted(directory.glob(f"{prefix}*{PAGES_SUFFIX}")):
            if not orphan.with_name(orphan.name.removesuffix(PAGES_SUFFIX) + HEADERS_SUFFIX).exists():
                orphan.unlink(missing_ok=True)


def _create(stem: Path, key: ArenaKey, layout: str, pages: int, page_bytes: int) -> ArenaFiles:
    pages_path = stem.with_name(stem.name + PAGES_SUFFIX)
    headers_path = stem.with_name(stem.name + HEADERS_SUFFIX)
    try:
        _allocate(pages_path, pages * page_bytes)
        _allocate(headers_path, headers_bytes(pages))
        files = ArenaFiles(key, layout, pages, page_bytes, stem)
    except OSError:
        pages_path.unlink(missing_ok=True)
        headers_path.unlink(missing_ok=True)
        raise
    for index in range(pages):
        files.write(PageRecord(index))
    # Last, so that a file that was not finished is not taken up.
    files._headers[: HEAD_BYTES // 2] = _head(files)
    return files


def _head(files: ArenaFiles) -> bytes:
    about = {
        "model": files.key.model,
        "fingerprint": files.key.fingerprint.hex(),
        "layout_digest": files.key.layout_digest.hex(),
        "layout": files.layout,
    }
    text = json.dumps(about).encode()
    head = HEAD.pack(MAGIC, files.pages, files.page_bytes, len(text)) + text
    if len(head) > HEAD_BYTES // 2:
        raise OSError("the name of the model is too long")
    return head.ljust(HEAD_BYTES // 2, b"\0")


def _open(stem: Path) -> ArenaFiles:
    headers_path = stem.with_name(stem.name + HEADERS_SUFFIX)
    with headers_path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        raise ValueError("shorter than its head")
    magic, pages, page_bytes, length = HEAD.unpack_from(head)
    if magic != MAGIC:
        raise ValueError("not of this version")
    about: dict[str, Any] = json.loads(head[HEAD.size : HEAD.size + length])
    key = ArenaKey(about["model"], bytes.fromhex(about["fingerprint"]), bytes.fromhex(about["layout_digest"]))
    for path, size in (
        (headers_path, headers_bytes(pages)),
        (stem.with_name(stem.name + PAGES_SUFFIX), pages * page_bytes),
    ):
        if path.stat().st_size != size:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    return ArenaFiles(key, about["layout"], pages, page_bytes, stem)


def _allocate(path: Path, size: int) -> None:
    """A file of `size` bytes that all exist: a sparse one on a full tmpfs ends in SIGBUS."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.ftruncate(handle, size)
    finally:
        os.close(handle)


def _map(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(handle)


def _free_bytes(directory: Path) -> int:
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
