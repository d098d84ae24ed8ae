"""Reads a safetensors file: named arrays, mapped and not copied.

The format: eight bytes with the header's length (little-endian), the header as JSON (for
each name its dtype, shape and offsets into what follows), the bytes. It does not know what
the arrays mean.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_LIMIT_BYTES = 64 << 20
_DTYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}


class SafetensorsError(ValueError):
    """The file is not usable; the message names it and the reason."""


def read(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays that have a dtype known here. Raises SafetensorsError or OSError."""
    data = np.memmap(path, np.uint8, "r")
    if len(data) < 8:
        raise SafetensorsError(f"{path}: it has no header")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    if size > min(len(data) - 8, HEADER_LIMIT_BYTES):
        raise SafetensorsError(f"{path}: its header has {size} bytes")
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
        return {
            name: _array(data[8 + size :], name, entry)
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in _DTYPES
        }
    except (ValueError, KeyError, TypeError) as error:
        raise SafetensorsError(f"{path}: {error}") from error


def _array(body: NDArray[np.uint8], name: str, entry: Mapping[str, Any]) -> NDArray[Any]:
    first, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
    if not 0 <= first <= end <= len(body) or end - first != int(np.prod(shape)) * dtype.itemsize:
        raise SafetensorsError(f"{name} lies outside of the file")
    return body[first:end].view(dtype).reshape(shape)
