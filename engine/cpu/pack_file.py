"""A pack as a file that workers of a node map together: written once, then only read.

    head      a page: magic, version, what it was made of (`key`), where the index lies, the index's digest
    data      from 2 MiB on, so that the system may map it in large pages
    index     JSON, with a digest of every 16 MiB of data

Nothing of a file is used before all of it was compared with its digests (xxh3-128: against accidents, not
against somebody who may write here: who may do that may replace the program as well).
A file appears whole, under its name, or not at all. Knows nothing of weights.
"""

import contextlib
import json
import mmap
import os
import secrets
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from engine.cpu.pack import ALIGNMENT, Bytes, Index, Pack, PackError

VERSION = 1
MODE = 0o600
SCRATCH_SUFFIX = ".new"
_MAGIC = b"kvmesh pack\n\0\0\0\0"
_HEAD = struct.Struct("<16sQ32sQQQ16s")
_DATA_AT = 2 << 20
_CHUNK_BYTES = 16 << 20
_MAX_INDEX_BYTES = 64 << 20


def open_pack(path: Path, key: bytes, *, threads: int = 1) -> Pack:
    """Maps the file and compares all of it. Raises PackError where it cannot be used, OSError where it cannot
    be read (FileNotFoundError: there is none)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise PackError("it is no regular file")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PackError("others may write to it")
        if found.st_size < _HEAD.size:
            raise PackError("it is cut short")
        mapped = mmap.mmap(handle, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(mapped)
    magic, version, its_key, data_bytes, index_at, index_bytes, digest = _HEAD.unpack_from(whole)
    if magic != _MAGIC or version != VERSION:
        raise PackError("it is of another version")
    if its_key != key:
        raise PackError("it was made of something else")
    if index_bytes > _MAX_INDEX_BYTES or index_at != _DATA_AT + data_bytes:
        raise PackError("its head is broken")
    if index_at + index_bytes != found.st_size:
        raise PackError("it is cut short")
    text = whole[index_at:]
    if _head_digest(key, data_bytes, index_bytes, text) != digest:
        raise PackError("its index is broken")
    try:
        document = json.loads(bytes(text))
        expected = [bytes.fromhex(part) for part in document["digests"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PackError(f"its index cannot be read: {error!r}") from error
    data = whole[_DATA_AT:index_at]
    chunks = [data[at : at + _CHUNK_BYTES] for at in range(0, data_bytes, _CHUNK_BYTES)]
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        if list(pool.map(xxhash.xxh3_128_digest, chunks)) != expected:
            raise PackError("its content is broken")
    return Pack(Index.from_json(document), np.frombuffer(data, np.uint8))


def _head_digest(key: bytes, data_bytes: int, index_bytes: int, text: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(key + struct.pack("<QQQ", VERSION, data_bytes, index_bytes))
    digest.update(text)
    return digest.digest()


class PackWriter:
    """A sink that writes a file: `with PackWriter(path, key) as sink: …; sink.finish(index)`.

    Without `finish` nothing is left of it. Raises OSError, as where the disk is full.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key
        self._scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}{SCRATCH_SUFFIX}")
        self._handle = os.open(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        # Written in large pieces: the system then keeps them in large pages.
        self._chunk = np.zeros(_CHUNK_BYTES, np.uint8)
        self._written = 0
        self._filled = 0
        self._digests: list[str] = []

    def __enter__(self) -> "PackWriter":
        os.fchmod(self._handle, MODE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._scratch.unlink(missing_ok=True)

    def put(self, part: Bytes) -> int:
        at = self._written + self._filled
        self._append(part)
        self._append(np.zeros(-len(part) % ALIGNMENT, np.uint8))
        return at

    def _append(self, part: Bytes) -> None:
        while len(part):
            room = min(len(part), _CHUNK_BYTES - self._filled)
            self._chunk[self._filled : self._filled + room] = part[:room]
            self._filled += room
            part = part[room:]
            if self._filled == _CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        if not self._filled:
            return
        chunk = self._chunk[: self._filled].data
        self._digests.append(xxhash.xxh3_128_hexdigest(chunk))
        _write_all(self._handle, chunk, _DATA_AT + self._written)
        self._written += self._filled
        self._filled = 0

    def finish(self, index: Index) -> None:
        """The file is there from now on, under its name."""
        self._flush()
        text = json.dumps({**index.to_json(), "digests": self._digests}).encode()
        index_at = _DATA_AT + self._written
        _write_all(self._handle, memoryview(text), index_at)
        digest = _head_digest(self._key, self._written, len(text), text)
        head = _HEAD.pack(_MAGIC, VERSION, self._key, self._written, index_at, len(text), digest)
        _write_all(self._handle, memoryview(head), 0)
        self._scratch.replace(self._path)


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
