"""Blocks as files: one file per block, in a folder per organisation, in a folder per arena.

    kv-disk/ARENA/ORGANISATION/BLOCK-PARENT.page      names are hex; ORGANISATION is a digest

A file gets its name only when it is whole, so one that was half written when the
store was killed is never taken for a block. What a machine lost with its power, and
whatever else happened to a file, is found when it is read: the head names the block,
and its checksum is that of the page when it was committed. Everything here blocks:
call it in a thread. It does not know which blocks are worth keeping.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import xxhash

from kvstore.seals import seal

MAGIC = b"KVMDISK1"
# magic, block id, parent id, xxh3-64 of the page, seal over the three
HEAD = struct.Struct("<8s16s16sQQ")
SUFFIX = ".page"
_SCRATCH = ".new"


def organisation_digest(org: str) -> str:
    """What an organisation is called on disk: its name may hold anything."""
    return blake2b(org.encode(), digest_size=16, person=b"kvmesh disk").hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one block lies. `org` is a digest."""

    arena: str
    org: str
    block_id: bytes
    parent_id: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """A file that an earlier store left."""

    place: Place
    file_bytes: int
    modified_at: float


class DiskFiles:
    """The folder of one store."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def file_bytes(self, page_bytes: int) -> int:
        """What a page takes on disk."""
        return HEAD.size + page_bytes

    def write(self, place: Place, page: memoryview, checksum: int, still: Callable[[], bool]) -> bool:
        """Keeps a page. False, and nothing is kept, if it is not `still` that block's after it was read.

        Raises OSError where the disk does not take it; nothing is left of it then.
        """
        head = HEAD.pack(
            MAGIC, place.block_id, place.parent_id, checksum, seal(place.block_id, place.parent_id, checksum)
        )
        path = self._path(place)
        for folder in (self._root, path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        scratch = path.with_name(path.name + _SCRATCH)
        try:
            handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                _write_all(handle, head)
                _write_all(handle, page)
            finally:
                os.close(handle)
            if not still():
                scratch.unlink(missing_ok=True)
                return False
            scratch.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
        return True

    def read(self, place: Place, page: memoryview) -> int | None:
        """Fills `page`; its checksum, or None if the file is not there, not whole, or of anything else."""
        try:
            handle = os.open(self._path(place), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            head = bytearray(HEAD.size)
            whole = os.fstat(handle).st_size == HEAD.size + len(page)
            if not whole or not _read_all(handle, memoryview(head)) or not _read_all(handle, page):
                return None
        except OSError:
            return None
        finally:
            os.close(handle)
        magic, block_id, parent_id, checksum, sealed = HEAD.unpack(head)
        intact = (
            magic == MAGIC
            and (block_id, parent_id) == (place.block_id, place.parent_id)
            and sealed == seal(block_id, parent_id, checksum)
            and xxhash.xxh3_64_intdigest(page) == checksum
        )
        return checksum if intact else None

    def remove(self, place: Place) -> None:
        """One block's file."""
        with contextlib.suppress(OSError):
            self._path(place).unlink(missing_ok=True)

    def remove_organisation(self, org: str) -> None:
        """Every file of an organisation, of all arenas; raises OSError where one stays."""
        for arena in self._arenas():
            if (folder := arena / org).is_dir():
                shutil.rmtree(folder)

    def remove_all(self) -> None:
        """Everything that an earlier store left."""
        if self._root.exists():
            shutil.rmtree(self._root)

    def find(self) -> Iterator[Found]:
        """What an earlier store left; what it did not finish, and whatever is no block, is removed."""
        for arena in self._arenas():
            for org in filter(Path.is_dir, arena.iterdir()):
                with os.scandir(org) as entries:
                    for entry in entries:
                        place = _place(arena.name, org.name, entry.name)
                        if place is None or not entry.is_file(follow_symlinks=False):
                            with contextlib.suppress(OSError):
                                os.unlink(entry.path)
                            continue
                        status = entry.stat(follow_symlinks=False)
                        yield Found(place, status.st_size, status.st_mtime)

    def _arenas(self) -> list[Path]:
        try:
            return [path for path in self._root.iterdir() if path.is_dir() and not path.is_symlink()]
        except OSError:
            return []

    def _path(self, place: Place) -> Path:
        name = f"{place.block_id.hex()}-{place.parent_id.hex()}{SUFFIX}"
        return self._root / place.arena / place.org / name


def _place(arena: str, org: str, name: str) -> Place | None:
    ids = name.removesuffix(SUFFIX).split("-")
    try:
        block_id, parent_id = (bytes.fromhex(part) for part in ids)
    except ValueError:
        return None
    if not name.endswith(SUFFIX) or len(block_id) != 16 or len(parent_id) != 16:
        return None
    return Place(arena, org, block_id, parent_id)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def _read_all(handle: int, place: memoryview) -> bool:
    while place:
        n = os.readv(handle, [place])
        if n == 0:
            return False
        place = place[n:]
    return True
