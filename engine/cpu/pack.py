"""A model's weights in the core's packed forms, as one stretch of bytes and an index of the parts in it.

Parts: matrices (perhaps several stacked), vectors, and the cosines and sines of ropes, which cost as much
time and memory to make as many a matrix. Knows nothing of where the bytes come from or lie.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.rope import Turns
from engine.weights.source import Floats

ALIGNMENT = 64
Bytes = NDArray[np.uint8]


class PackError(Exception):
    """These bytes are no pack that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Form:
    """What weights must share to be stacked: the core's form, whether there are minima, inputs per scale."""

    name: str
    minima: bool
    group: int


@dataclass(frozen=True, slots=True)
class MatrixKey:
    """Matrices stacked along their outputs; `paired` puts those of two side by side in turns of eight."""

    names: tuple[str, ...]
    paired: bool = False


@dataclass(frozen=True, slots=True)
class RopeKey:
    positions: int
    turns: Turns
    divisors: str | None
    """The tensor that frequencies are divided by."""


@dataclass(frozen=True, slots=True)
class Matrix:
    key: MatrixKey
    form: Form
    rows: int
    columns: int
    half: bool
    """Scales and minima are f16."""
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Vector:
    names: tuple[str, ...]
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines, then sines, each float32 [positions, pairs]."""

    key: RopeKey
    digest: str
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Wants:
    """What a program needs of a pack; `forms` of every matrix by itself."""

    forms: Mapping[str, Form]
    matrices: tuple[MatrixKey, ...]
    vectors: tuple[tuple[str, ...], ...]
    ropes: tuple[RopeKey, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Where the parts lie."""

    forms: Mapping[str, Form]
    matrices: Mapping[MatrixKey, Matrix]
    vectors: Mapping[tuple[str, ...], Vector]
    ropes: Mapping[RopeKey, RopeTables]

    def to_json(self) -> dict[str, Any]:
        return {
            "forms": {name: asdict(form) for name, form in self.forms.items()},
            "matrices": [asdict(matrix) for matrix in self.matrices.values()],
            "vectors": [asdict(vector) for vector in self.vectors.values()],
            "ropes": [asdict(tables) for tables in self.ropes.values()],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Index":
        """Raises PackError where that is no index."""
        try:
            matrices = [_matrix(entry) for entry in document["matrices"]]
            vectors = [Vector(**{**entry, "names": tuple(entry["names"])}) for entry in document["vectors"]]
            ropes = [_rope(entry) for entry in document["ropes"]]
            forms = {name: Form(**form) for name, form in document["forms"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise PackError(f"the index cannot be read: {error!r}") from error
        return cls(
            forms,
            {matrix.key: matrix for matrix in matrices},
            {vector.names: vector for vector in vectors},
            {tables.key: tables for tables in ropes},
        )


def _matrix(entry: Mapping[str, Any]) -> Matrix:
    key = MatrixKey(tuple(entry["key"]["names"]), entry["key"]["paired"])
    return Matrix(**{**entry, "key": key, "form": Form(**entry["form"])})


def _rope(entry: Mapping[str, Any]) -> RopeTables:
    key = entry["key"]
    return RopeTables(**{**entry, "key": RopeKey(key["positions"], Turns(**key["turns"]), key["divisors"])})


@dataclass(frozen=True, slots=True)
class Pack:
    """`data` is never written to once a pack is made."""

    index: Index
    data: Bytes

    def bytes_of(self, part: Matrix | Vector | RopeTables) -> Bytes:
        end = part.at + part.nbytes
        if part.at < 0 or part.nbytes < 0 or end > len(self.data):
            raise PackError("a part leaves the pack")
        return self.data[part.at : end]

    def floats(self, vector: Vector) -> Floats:
        return self.bytes_of(vector).view(np.float32)

    def tables(self, part: RopeTables) -> tuple[Floats, Floats]:
        both = self.bytes_of(part).view(np.float32).reshape(2, part.key.positions, -1)
        return both[0], both[1]
