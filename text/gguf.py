"""Reads GGUF model files (versions 2 and 3, little endian) strictly, without loading the weights.

The header is parsed once; tensor bytes are handed out as views into a read-only mapping. Every count and
length in the file is checked against what the file can hold before anything is allocated, so a hostile or
truncated file costs nothing and ends in a `GgufError` that names the place. Does not know what any key means,
except `general.alignment`, and does not dequantise.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

from text.errors import GgufError
from text.ggml_types import GgmlType

__all__ = ["GgmlType", "GgufError", "GgufFile", "TensorInfo"]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
# Far above any real file, and low enough that parsing a hostile one stays cheap.
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_ITEMS = 1 << 23  # over all arrays of the file
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 256
MAX_ELEMENTS = 1 << 62

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is row-major (ggml's order reversed); `offset` is counted from the file's start."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count


class GgufFile:
    """An open GGUF file: metadata, tensor descriptions, and views of the tensor bytes."""

    def __init__(self, path: Path, view: mmap.mmap, status: os.stat_result, *, strings: bool = True) -> None:
        self.path = path
        self._map: mmap.mmap | None = view
        #: Of the file that was opened: another one may lie at `path` by now.
        self.status = status
        header = _Header(path, view, strings)
        self.version = header.version
        #: Key -> bool, int, float, str, or a list of one of these.
        self.metadata: Mapping[str, Any] = MappingProxyType(header.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)
        self.alignment = header.alignment
        self.data_offset = header.data_offset
        self.nbytes = len(view)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, strings: bool = True) -> Self:
        """Maps and parses `path`. Raises `GgufError`, also where the file is missing or no regular file.

        Without `strings` arrays of strings (the vocabulary: most of the time that this takes) are stepped
        over and are not in the metadata.
        """
        where = Path(path)
        try:
            # Asked before opening: opening a pipe would wait for its other end.
            if not stat.S_ISREG(where.stat().st_mode):
                raise GgufError(f"{where}: not a regular file")
            with where.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size == 0:
                    raise GgufError(f"{where}: the file is empty")
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            if isinstance(error, GgufError):
                raise
            raise GgufError(f"{where}: cannot be opened: {error}") from error
        try:
            return cls(where, view, status, strings=strings)
        except BaseException:
            view.close()
            raise

    def content(self) -> memoryview:
        """All bytes of the file, as `data`."""
        if self._map is None:
            raise GgufError(f"{self.path}: the file was closed")
        return memoryview(self._map)

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, a read-only view into the mapping (`nbytes` long, nothing is copied).

        Raises `GgufError` where the file has no such tensor, or was closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"{self.path}: no tensor named {name!r}")
        return self.content()[info.offset : info.offset + info.nbytes]

    def close(self) -> None:
        """Ends access to the tensors. Views still held stay valid; the mapping ends with the last of them."""
        view, self._map = self._map, None
        if view is not None:
            try:
                view.close()
            except BufferError:  # views of it are alive; they own the mapping now
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Header:
    """One pass over the header. `self._at` is the read position; every read is checked against the end."""

    def __init__(self, path: Path, view: mmap.mmap, strings: bool) -> None:
        self._path = path
        self._view = view
        self._keeps_strings = strings
        self._size = len(view)
        self._end = min(self._size, MAX_HEADER_BYTES)
        self._at = 0
        self._items_left = MAX_ARRAY_ITEMS
        self._place = "header"

        if view[:4] != MAGIC:
            self._fail(f"magic is {view[:4]!r}, not {MAGIC!r}", at=0)
        self._at = 4
        self.version = self._number("I")
        if self.version not in (2, 3):
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            reason = (
                "big-endian files are not supported" if swapped in (2, 3) else "only 2 and 3 are supported"
            )
            self._fail(f"version {self.version}: {reason}", at=4)
        tensor_count = self._count("tensors", MAX_TENSORS, least_bytes=8 + 4 + 8 + 4 + 8)
        key_count = self._count("metadata keys", MAX_KEYS, least_bytes=8 + 4 + 1)
        self.metadata: dict[str, Any] = {}
        self._keys: set[str] = set()
        for index in range(key_count):
            self._read_pair(index)
        self.alignment = self._alignment()
        found = [self._tensor_info(index) for index in range(tensor_count)]
        self._place = "header"
        self.data_offset = -(-self._at // self.alignment) * self.alignment
        self.tensors = self._placed(found)

    def _read_pair(self, index: int) -> None:
        self._place = f"metadata key {index}"
        key = self._string(MAX_KEY_BYTES)
        self._place = f"metadata key {key!r}"
        if not key:
            self._fail("the key is empty")
        if key in self._keys:
            self._fail("the key appears twice")
        self._keys.add(key)
        value = self._value(self._number("I"))
        if value is not None:
            self.metadata[key] = value

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string(MAX_HEADER_BYTES)
        if kind == _ARRAY:
            return self._array()
        code = _SCALARS.get(kind)
        if code is None:
            self._fail(f"unknown value type {kind}")
        value = self._number(code)
        return self._bool(value) if kind == _BOOL else value

    def _array(self) -> list[Any] | None:
        kind = self._number("I")
        if kind == _ARRAY:
            self._fail("arrays of arrays are not supported")
        code = _SCALARS.get(kind)
        if code is None and kind != _STRING:
            self._fail(f"unknown array item type {kind}")
        width = struct.calcsize(f"<{code}") if code else 8
        count = self._count("array items", self._items_left, least_bytes=width)
        self._items_left -= count
        if code is None:
            if self._keeps_strings:
                return self._strings(count)
            self._step_over(count)
            return None
        values = list(struct.unpack_from(f"<{count}{code}", self._view, self._at))
        self._at += count * width
        return [self._bool(value) for value in values] if kind == _BOOL else values

    def _strings(self, count: int) -> list[str]:
        # The vocabulary: several hundred thousand strings, so this loop keeps its hands free.
        view, at, end, read = self._view, self._at, self._end, _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                (length,) = read(view, at)
                stop = at + 8 + length
                if stop > end:
                    self._fail(f"string {len(out)} of {length} bytes runs past the end of the file", at=at)
                out.append(view[at + 8 : stop].decode())
                at = stop
        except struct.error:
            self._fail(f"string {len(out)} runs past the end of the file", at=at)
        except UnicodeDecodeError as error:
            self._fail(f"string {len(out)} is not UTF-8: {error.reason}", at=at)
        self._at = at
        return out

    def _step_over(self, count: int) -> None:
        at, end, read, view = self._at, self._end, _U64.unpack_from, self._view
        for index in range(count):
            start = at
            at += 8
            if at <= end:
                at += read(view, start)[0]
            if at > end:
                self._fail(f"string {index} runs past the end of the file", at=start)
        self._at = at

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self._place = "metadata key 'general.alignment'"
            self._fail(f"{value!r} is not a power of two up to {MAX_ALIGNMENT}")
        return value

    def _tensor_info(self, index: int) -> TensorInfo:
        self._place = f"tensor {index}"
        name = self._string(MAX_TENSOR_NAME_BYTES)
        self._place = f"tensor {name!r}"
        if not name:
            self._fail("the name is empty")
        dims = self._number("I")
        if not 1 <= dims <= MAX_DIMS:
            self._fail(f"{dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(self._number("Q") for _ in range(dims))
        type_id, offset = self._number("I"), self._number("Q")
        try:
            kind = GgmlType(type_id)
        except ValueError:
            self._fail(f"unknown tensor type {type_id}")
        elements = 1
        for dim in shape:
            elements *= dim
            if not 0 < elements <= MAX_ELEMENTS:
                self._fail(f"impossible shape {shape}")
        if shape[0] % kind.block_size:
            self._fail(
                f"rows of {shape[0]} elements are no whole number of {kind.name} blocks of {kind.block_size}"
            )
        if offset % self.alignment:
            self._fail(f"offset {offset} is not a multiple of the alignment {self.alignment}")
        return TensorInfo(name, kind, shape[::-1], offset, elements // kind.block_size * kind.type_size)

    def _placed(self, found: list[TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors with absolute offsets, after checking that each lies in the file and on its own."""
        out: dict[str, TensorInfo] = {}
        for info in found:
            self._place = f"tensor {info.name!r}"
            if info.name in out:
                self._fail("the name appears twice", at=None)
            offset = self.data_offset + info.offset
            if offset + info.nbytes > self._size:
                self._fail(f"{info.nbytes} bytes at {offset} run past the end ({self._size} bytes)", at=None)
            out[info.name] = TensorInfo(info.name, info.type, info.shape, offset, info.nbytes)
        ordered = sorted(out.values(), key=lambda info: info.offset)
        for before, after in pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                self._place = f"tensor {after.name!r}"
                self._fail(f"its bytes overlap those of tensor {before.name!r}", at=None)
        return out

    def _number(self, code: str) -> Any:
        width = struct.calcsize(f"<{code}")
        if self._at + width > self._end:
            self._fail_end()
        (value,) = struct.unpack_from(f"<{code}", self._view, self._at)
        self._at += width
        return value

    def _string(self, limit: int) -> str:
        start = self._at
        length = self._number("Q")
        if length > limit:
            self._fail(f"a string of {length} bytes; {limit} are allowed", at=start)
        if self._at + length > self._end:
            self._fail(f"a string of {length} bytes runs past the end of the file", at=start)
        raw = self._view[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self._fail(f"a string is not UTF-8: {error.reason}", at=start)

    def _count(self, what: str, limit: int, least_bytes: int) -> int:
        start = self._at
        count: int = self._number("Q")
        if count > limit:
            self._fail(f"{count} {what}; at most {limit} are possible here", at=start)
        if count * least_bytes > self._end - self._at:
            self._fail(f"{count} {what} do not fit in the rest of the file", at=start)
        return count

    def _bool(self, value: int) -> bool:
        if value > 1:
            self._fail(f"a truth value of {value}")
        return value == 1

    def _fail_end(self) -> NoReturn:
        if self._size > MAX_HEADER_BYTES:
            self._fail(f"the header is larger than {MAX_HEADER_BYTES} bytes")
        self._fail("the file ends here")

    def _fail(self, reason: str, at: int | None = -1) -> NoReturn:
        position = "" if at is None else f" at byte {self._at if at == -1 else at}"
        raise GgufError(f"{self._path}: {self._place}{position}: {reason}")
