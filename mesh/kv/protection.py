"""A mode for tests: pages that this worker may not write are mapped read-only.

A stray write into a committed page then ends the process on the spot, where it would
otherwise be found by a checksum on another node, or never. It costs a system call
for every page that changes hands.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

from mesh.errors import InvalidRequest
from mesh.kv.page import Page

_LIBC = ctypes.CDLL(None, use_errno=True)


class Protection:
    """Of one mapped arena. Call `allow` when a page becomes this worker's to write, else `forbid`."""

    def __init__(self, arena: mmap.mmap, page_bytes: int) -> None:
        if page_bytes % mmap.PAGESIZE:
            raise InvalidRequest(
                f"pages of {page_bytes} bytes cannot be protected: the machine's have {mmap.PAGESIZE}"
            )
        self._page_bytes = page_bytes
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        self._set(0, len(arena), mmap.PROT_READ)

    def allow(self, index: int) -> None:
        self._set(index * self._page_bytes, self._page_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def forbid(self, index: int) -> None:
        self._set(index * self._page_bytes, self._page_bytes, mmap.PROT_READ)

    def _set(self, offset: int, size: int, rights: int) -> None:
        address = ctypes.c_void_p(self._start + offset)
        if _LIBC.mprotect(address, ctypes.c_size_t(size), ctypes.c_int(rights)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Owned(dict[int, Page]):
    """The pages that a worker may write; tells who comes and who goes."""

    def __init__(self) -> None:
        super().__init__()
        self.came: Callable[[int], None] | None = None
        self.went: Callable[[int], None] | None = None

    def __setitem__(self, index: int, page: Page) -> None:
        super().__setitem__(index, page)
        if self.came is not None:
            self.came(index)

    def __delitem__(self, index: int) -> None:
        super().__delitem__(index)
        if self.went is not None:
            self.went(index)

    def discard(self, index: int) -> None:
        """Forgets a page if it is known."""
        if index in self:
            del self[index]
