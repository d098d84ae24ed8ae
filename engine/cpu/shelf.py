"""Hands the parts of a pack to an engine, each once. And its twin, which only notes what would be handed.

Knows nothing of operations.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.cpu.pack import Form, MatrixKey, Pack, RopeKey, Wants
from engine.cpu.packing import form_of
from engine.program import Weight
from engine.weights.source import WeightSource
from kernels.cpu import Core, CoreEngine

_CODED = frozenset({"u4", "i8"})


@dataclass(frozen=True, slots=True)
class Shelved:
    """A weight in the core: its index, and whether products with it want quantised rows."""

    index: int
    quantised: bool


class Shelving(Protocol):
    """What lowering asks for; everything by its index in the engine."""

    def form(self, weight: Weight) -> Form:
        """What can be stacked: weights of equal form."""

    def weight(self, parts: Sequence[Weight], *, paired: bool = False) -> Shelved:
        """Matrices of equal form stacked along their outputs (see `MatrixKey`)."""

    def vector(self, names: Sequence[str]) -> int: ...
    def rope(self, key: RopeKey) -> int: ...


class Shelf:
    """Implements `Shelving` over a pack."""

    def __init__(self, engine: CoreEngine, pack: Pack) -> None:
        self._engine = engine
        self._pack = pack
        self._weights: dict[MatrixKey, Shelved] = {}
        self._vectors: dict[tuple[str, ...], int] = {}
        self._ropes: dict[RopeKey, int] = {}
        self.nbytes = 0
        """Of the matrices that were handed over."""

    @property
    def rope_digests(self) -> list[str]:
        return [self._pack.index.ropes[key].digest for key in self._ropes]

    def form(self, weight: Weight) -> Form:
        return self._pack.index.forms[weight.names[0]]

    def weight(self, parts: Sequence[Weight], *, paired: bool = False) -> Shelved:
        key = _key(parts, paired)
        if key not in self._weights:
            part = self._pack.index.matrices[key]
            form = part.form
            index = self._engine.weight(
                form.name,
                part.rows,
                part.columns,
                part.half,
                form.minima,
                form.group,
                self._pack.bytes_of(part),
            )
            self._weights[key] = Shelved(index, form.name in _CODED)
            self.nbytes += part.nbytes
        return self._weights[key]

    def vector(self, names: Sequence[str]) -> int:
        key = tuple(names)
        if key not in self._vectors:
            self._vectors[key] = self._engine.vector(self._pack.floats(self._pack.index.vectors[key]))
        return self._vectors[key]

    def rope(self, key: RopeKey) -> int:
        if key not in self._ropes:
            self._ropes[key] = self._engine.rope_table(*self._pack.tables(self._pack.index.ropes[key]))
        return self._ropes[key]


class WishList:
    """Implements `Shelving` for an engine that never runs: memory that nobody touches stands for weights."""

    def __init__(self, core: Core, engine: CoreEngine, weights: WeightSource) -> None:
        self._core = core
        self._engine = engine
        self._weights = weights
        self._forms: dict[str, Form] = {}
        self._matrices: dict[MatrixKey, Shelved] = {}
        self._vectors: dict[tuple[str, ...], int] = {}
        self._ropes: dict[RopeKey, int] = {}
        self.bytes_at_most = 0
        """Of all the parts."""

    @property
    def wants(self) -> Wants:
        return Wants(self._forms, tuple(self._matrices), tuple(self._vectors), tuple(self._ropes))

    def form(self, weight: Weight) -> Form:
        name = weight.names[0]
        if name not in self._forms:
            self._forms[name] = form_of(self._weights, name)
        return self._forms[name]

    def weight(self, parts: Sequence[Weight], *, paired: bool = False) -> Shelved:
        key = _key(parts, paired)
        if key not in self._matrices:
            form = self.form(parts[0])
            rows, columns = sum(part.rows for part in parts), parts[0].columns
            nbytes = self._core.packed_bytes(form.name, rows, columns, False, form.minima, form.group)
            index = self._engine.weight(
                form.name, rows, columns, False, form.minima, form.group, self._untouched(nbytes)
            )
            self._matrices[key] = Shelved(index, form.name in _CODED)
        return self._matrices[key]

    def vector(self, names: Sequence[str]) -> int:
        key = tuple(names)
        if key not in self._vectors:
            width = sum(self._weights.shapes[name][0] for name in names)
            self._vectors[key] = self._engine.vector(self._untouched(4 * width).view(np.float32))
        return self._vectors[key]

    def rope(self, key: RopeKey) -> int:
        if key not in self._ropes:
            half = 4 * key.positions * (key.turns.dim // 2)
            both = self._untouched(2 * half).view(np.float32).reshape(2, key.positions, -1)
            self._ropes[key] = self._engine.rope_table(both[0], both[1])
        return self._ropes[key]

    def _untouched(self, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        self.bytes_at_most += nbytes + 64
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def _key(parts: Sequence[Weight], paired: bool) -> MatrixKey:
    return MatrixKey(tuple(name for part in parts for name in part.names), paired)
