"""Weights of a GGUF file, dequantised to float32. Knows nothing of what the tensors mean."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.errors import WeightError
from engine.weights.codes import Codes, Halves, codes, halves
from engine.weights.dequant import dequantise, supported
from engine.weights.known_digests import file_stamp, last_change_s
from engine.weights.source import Floats, ModelSource
from text.gguf import GgufFile, TensorInfo

_DIGEST_CHUNK_BYTES = 1 << 24
_CHECK_BLOCKS = 1 << 15


class GgufWeights:
    """Implements `engine.weights.source.WeightSource` over an open file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._checked: set[str] = set()
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(info.shape) for name, info in file.tensors.items()
        }

    def load(self, name: str) -> Floats:
        info = self._info(name)
        values = dequantise(self._file.data(name), info.type).reshape(info.shape)
        _check_finite(values, info)
        self._checked.add(name)
        return values

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        info = self._info(name)
        columns = info.shape[-1]
        row_bytes = columns // info.type.block_size * info.type.type_size
        stored = np.frombuffer(self._file.data(name), np.uint8).reshape(-1, row_bytes)
        picked = np.ascontiguousarray(stored[np.asarray(rows, dtype=np.int64)])
        return dequantise(picked, info.type).reshape(len(rows), columns)

    def check(self, name: str) -> None:
        if name in self._checked:
            return
        info = self._info(name)
        stored = self._file.data(name)
        # In pieces: expanded as a whole, an embedding table can be a gigabyte.
        step = _CHECK_BLOCKS * info.type.type_size
        for start in range(0, len(stored), step):
            _check_finite(dequantise(stored[start : start + step], info.type), info)
        self._checked.add(name)

    def codes(self, name: str, rows: int | None = None) -> Codes | Halves | None:
        """The stored codes or halves of a matrix, or of its first `rows`, as they are (see `codes.py`).

        None where it has neither."""
        info = self._info(name)
        if len(info.shape) != 2:
            return None
        data = self._file.data(name)
        if rows is None:
            rows = info.shape[0]
        else:
            data = data[: rows * (info.shape[1] // info.type.block_size * info.type.type_size)]
        return codes(data, info.type, rows) or halves(data, info.type, rows)

    def digest(self) -> bytes:
        whole = blake2b(digest_size=16, person=b"kvmesh.weights")
        content = self._file.content()
        for start in range(0, len(content), _DIGEST_CHUNK_BYTES):
            whole.update(content[start : start + _DIGEST_CHUNK_BYTES])
        return whole.digest()

    def stamp(self) -> bytes | None:
        return file_stamp(self._file.path, self._file.status)

    def changed_s(self) -> float:
        return last_change_s(self._file.status)

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise WeightError(f"the file has no tensor {name!r}")
        if not supported(info.type):
            raise WeightError(f"tensor {name!r} is of type {info.type.name}, which cannot be read")
        if not info.shape or info.shape[-1] % info.type.block_size:
            raise WeightError(
                f"tensor {name!r} has rows of {info.shape[-1:]} elements: "
                f"{info.type.name} needs whole blocks of {info.type.block_size}"
            )
        return info


def _check_finite(values: Floats, info: TensorInfo) -> None:
    if not np.isfinite(values).all():
        raise WeightError(f"tensor {info.name!r} ({info.type.name}) holds values that are not finite")


def open_model(path: Path) -> ModelSource:
    """Opens a GGUF file as a model. Raises `text.errors.GgufError`, or WeightError if it names none."""
    file = GgufFile.open(path, strings=False)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise WeightError(f"{path}: general.architecture is missing or no text")
    name = file.metadata.get("general.name")
    return ModelSource(
        name=name if isinstance(name, str) else path.stem,
        architecture=architecture,
        metadata=file.metadata,
        weights=GgufWeights(file),
    )
