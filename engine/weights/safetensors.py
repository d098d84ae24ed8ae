"""Weights in safetensors files: one, or several that an index assigns tensors to.

The index decides, tensor by tensor: what else lies in a shard or in the directory is not read.
Headers are not trusted: sizes are bounded, ranges lie inside the file and do not overlap. Files are mapped,
never read as a whole. Format: https://github.com/huggingface/safetensors. Knows nothing of tensors' meaning.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import WeightError
from engine.weights.source import Floats

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 17
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_OTHER_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_CHUNK_BYTES = 1 << 24
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    status: os.stat_result
    """Of the file when it was opened."""


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a model directory by name. Raises WeightError that names the file (and tensor)."""
    index = directory / INDEX
    if index.exists():
        return _indexed(directory, _weight_map(index))
    files = [directory / SINGLE] if (directory / SINGLE).exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{directory}: neither {SINGLE} nor {INDEX}")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_file(file).items():
            if name in found:
                raise WeightError(
                    f"{file}: tensor {name!r} lies in {found[name].file.name} too, and there is no index"
                )
            found[name] = tensor
    return found


def _indexed(directory: Path, assigned: Mapping[str, str]) -> dict[str, StoredTensor]:
    shards: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for name, shard in assigned.items():
        if shard not in shards:
            file = directory / shard
            if not file.is_file():
                raise WeightError(f"{file} is missing: {INDEX} assigns tensor {name!r} to it")
            shards[shard] = read_file(file)
        tensor = shards[shard].get(name)
        if tensor is None:
            raise WeightError(f"{directory / shard} has no tensor {name!r}, which {INDEX} assigns to it")
        found[name] = tensor
    return found


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise WeightError(f"{index}: larger than {MAX_HEADER_BYTES} bytes")
    assigned = _json(index.read_bytes(), index).get("weight_map")
    if not isinstance(assigned, dict) or not assigned:
        raise WeightError(f"{index}: weight_map is missing or empty")
    for name, shard in assigned.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise WeightError(
                f"{index}: tensor {name!r} is assigned to {shard!r}, which is no shard beside the index"
            )
    return assigned


def read_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, mapped."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        length = int.from_bytes(opened.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise WeightError(f"{file}: no safetensors file (a header of {length} bytes in a file of {size})")
        header = _json(opened.read(length), file)
        status = os.fstat(opened.fileno())
        mapped = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))[8 + length :]
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise WeightError(f"{file}: {len(header)} tensors; at most {MAX_TENSORS} are possible")
    found: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, start, end = _entry(file, name, entry, len(mapped))
        ranges.append((start, end, name))
        found[name] = StoredTensor(file, dtype, shape, mapped[start:end], status)
    for before, after in pairwise(sorted(ranges)):
        if after[0] < before[1]:
            raise WeightError(f"{file}: tensor {after[2]!r}: its bytes overlap those of {before[2]!r}")
    return found


def _entry(file: Path, name: str, entry: Any, size: int) -> tuple[str, tuple[int, ...], int, int]:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise WeightError(f"{where}: its entry is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    item = _ITEM_BYTES.get(str(dtype)) or _OTHER_ITEM_BYTES.get(str(dtype))
    if item is None:
        raise WeightError(f"{where}: dtype {dtype!r} is not known")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_count(n) for n in shape):
        raise WeightError(f"{where}: shape {shape!r} is none")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_count(n) for n in offsets):
        raise WeightError(f"{where}: data_offsets {offsets!r} are none")
    start, end = offsets
    if not start <= end <= size:
        raise WeightError(
            f"{where}: bytes {start} to {end} leave the file (it is cut short, or the header is wrong)"
        )
    if end - start != math.prod(shape) * item:
        raise WeightError(f"{where}: {end - start} bytes for shape {shape} of {dtype}")
    return str(dtype), tuple(shape), start, end


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _json(raw: bytes, file: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise WeightError(f"{file}: a name stands twice in one object")
        return out

    try:
        value = json.loads(raw, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{file}: the header is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightError(f"{file}: the header is no JSON object")
    return value


def numbers(tensor: StoredTensor, name: str) -> NDArray[Any]:
    """The stored numbers, without a copy: float32, float16, or bfloat16 as uint16."""
    kinds: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    if tensor.dtype not in kinds:
        raise WeightError(f"{tensor.file}: tensor {name!r} is of dtype {tensor.dtype}, which cannot be read")
    return np.frombuffer(tensor.data, kinds[tensor.dtype]).reshape(tensor.shape)


def as_floats(stored: NDArray[Any]) -> Floats:
    """float32, of what `numbers` gives."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def content_digest(tensors: Mapping[str, StoredTensor], extra: Sequence[bytes] = ()) -> bytes:
    """BLAKE2b-128 of names, dtypes, shapes and bytes, however they are cut into files."""
    whole = blake2b(digest_size=16, person=b"kvmesh.weights")
    for part in extra:
        whole.update(len(part).to_bytes(8, "little") + part)
    for name, tensor in sorted(tensors.items()):
        head = json.dumps([name, tensor.dtype, tensor.shape]).encode()
        whole.update(len(head).to_bytes(8, "little") + head)
        for start in range(0, len(tensor.data), _CHUNK_BYTES):
            whole.update(tensor.data[start : start + _CHUNK_BYTES])
    return whole.digest()
