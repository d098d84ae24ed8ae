"""The arena and its headers as a worker maps them: pages for writing, headers for reading."""

from __future__ import annotations

import fcntl
import mmap
import os

from mesh.errors import Unavailable
from mesh.kv.header_file import Header, headers_bytes, read_header
from mesh.kv.protection import Protection


class ArenaMapping:
    """Both files of one arena. Views of `arena` must not outlive this object."""

    def __init__(self, arena_path: str, headers_path: str, pages: int, page_bytes: int) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        handle = os.open(arena_path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            status = os.fstat(handle)
            self._identity = (status.st_dev, status.st_ino)
            self._map = mmap.mmap(
                handle, pages * page_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(handle)
        handle = os.open(headers_path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            self._headers = mmap.mmap(handle, headers_bytes(pages), mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(handle)
        self.arena = memoryview(self._map)

    def is_at(self, arena_path: str) -> bool:
        """Whether the file of that name is the one mapped here."""
        try:
            status = os.stat(arena_path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def protection(self) -> Protection:
        """Makes the arena read-only here, but for what is allowed from now on."""
        return Protection(self._map, self.page_bytes)

    def header(self, index: int) -> Header:
        """What the store says of a page."""
        return read_header(self._headers, index)


class OwnerLock:
    """The lock on `owners/<epoch>`, held for the life of the process: proof that it lives."""

    def __init__(self, path: str) -> None:
        """Raises Unavailable if the lock cannot be had: the store has given the epoch up."""
        try:
            # O_CLOEXEC is Python's default: a started program does not keep the worker alive.
            self._handle = os.open(path, os.O_RDWR)
        except OSError as error:
            raise Unavailable(f"the owner lock is gone: {error}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._handle)
            raise Unavailable(f"the owner lock cannot be taken: {error}") from error

    def release(self) -> None:
        """After a clean goodbye."""
        os.close(self._handle)
