"""Weights in the core's packed forms: read once, stacked, packed into one stretch of memory, shared by name.

Knows nothing of operations.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.errors import WeightError
from engine.program import Weight
from engine.weights.codes import GROUP, Codes, Halves
from engine.weights.source import Floats, WeightSource
from kernels.cpu import Core, CoreEngine

_ALIGNMENT = 64
_PANEL = 16
_HALF_PANEL = 8

T = TypeVar("T", bound=np.generic)


@runtime_checkable
class CodeSource(Protocol):
    """A source that can give stored codes and halves as they are."""

    def codes(self, name: str) -> Codes | Halves | None: ...


@dataclass(frozen=True, slots=True)
class Shelved:
    """A weight in the core: its index, and whether products with it want quantised rows."""

    index: int
    quantised: bool


class Shelf:
    """Loads and packs weights for one engine."""

    def __init__(self, core: Core, engine: CoreEngine, weights: WeightSource, capacity_bytes: int) -> None:
        self._core = core
        self._engine = engine
        self._weights = weights
        # Only what is written to is ever backed by memory.
        self._memory = mmap.mmap(-1, max(capacity_bytes, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._used = 0
        self._known: dict[tuple[tuple[str, ...], bool], Shelved] = {}
        self._forms: dict[str, Codes | Halves | Floats] = {}
        self._vectors: dict[tuple[str, ...], int] = {}

    @property
    def nbytes(self) -> int:
        return self._used

    def form(self, weight: Weight) -> tuple[str, bool, int]:
        """What can be stacked: weights of equal form."""
        found = self._read(weight.names[0])
        if isinstance(found, Codes):
            return found.form, found.minima is not None, found.group
        return (found.form if isinstance(found, Halves) else "f32"), False, GROUP

    def weight(self, parts: Sequence[Weight], *, paired: bool = False) -> Shelved:
        """Matrices of equal form stacked along their outputs; `paired` puts the outputs of two side by side
        in turns of eight. Raises WeightError where a number is not finite."""
        names = tuple(name for part in parts for name in part.names)
        key = (names, paired)
        if key not in self._known:
            self._known[key] = self._pack(names, paired)
        return self._known[key]

    def vector(self, names: Sequence[str]) -> int:
        key = tuple(names)
        if key not in self._vectors:
            values = np.concatenate([self._weights.load(name) for name in names])
            self._vectors[key] = self._engine.vector(np.ascontiguousarray(values))
        return self._vectors[key]

    def floats(self, name: str) -> Floats:
        return self._weights.load(name)

    def _read(self, name: str) -> Codes | Halves | Floats:
        if name not in self._forms:
            stored = self._weights.codes(name) if isinstance(self._weights, CodeSource) else None
            usable = isinstance(stored, Halves) or (stored is not None and stored.codes.shape[1] % GROUP == 0)
            if stored is not None and usable:
                if not stored.finite:
                    raise WeightError(f"tensor {name!r} holds values that are not finite")
                self._forms[name] = stored
            else:
                self._forms[name] = self._weights.load(name)
        return self._forms[name]

    def _pack(self, names: tuple[str, ...], paired: bool) -> Shelved:
        read = [self._read(name) for name in names]
        for name in names:
            del self._forms[name]
        try:
            return self._pack_parts(read, paired)
        except ValueError as error:
            raise WeightError(f"tensor {' + '.join(names)} cannot be packed: {error}") from error

    def _pack_parts(self, read: Sequence[Codes | Halves | Floats], paired: bool) -> Shelved:
        first = read[0]
        if isinstance(first, Codes):
            coded = [part for part in read if isinstance(part, Codes)]
            return self._pack_codes(
                first.form,
                first.group,
                _stack([part.codes for part in coded], paired),
                _stack([part.scales for part in coded], paired),
                None
                if first.minima is None
                else _stack([part.minima for part in coded if part.minima is not None], paired),
            )
        if isinstance(first, Halves):
            bits = _stack([part.values for part in read if isinstance(part, Halves)], paired)
            out = self._room(first.form, bits)
            self._core.pack_halves(first.form, bits, out)
            return self._numbers(first.form, bits, out)
        values = _stack([part for part in read if not isinstance(part, Codes | Halves)], paired)
        out = self._room("f32", values)
        self._core.pack_floats(values, out)
        return self._numbers("f32", values, out)

    def _room(self, form: str, values: NDArray[Any]) -> NDArray[np.uint8]:
        rows, columns = values.shape
        return self._take(self._core.packed_bytes(form, rows, columns, False, False, GROUP))

    def _numbers(self, form: str, values: NDArray[Any], out: NDArray[np.uint8]) -> Shelved:
        rows, columns = values.shape
        return Shelved(self._engine.weight(form, rows, columns, False, False, GROUP, out), False)

    def _pack_codes(
        self, form: str, group: int, codes: NDArray[np.uint8], scales: Floats, minima: Floats | None
    ) -> Shelved:
        rows, columns = codes.shape
        fits = group == GROUP and self._core.fits_half(scales)
        half = fits and (minima is None or self._core.fits_half(minima))
        with_minima = minima is not None
        out = self._take(self._core.packed_bytes(form, rows, columns, half, with_minima, group))
        self._core.pack_codes(form, half, group, codes, scales, minima, out)
        return Shelved(self._engine.weight(form, rows, columns, half, with_minima, group, out), True)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        start = self._used
        if start + nbytes > len(self._bytes):
            raise WeightError("the packed weights are larger than was planned")
        self._used = -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[start : start + nbytes]


def most_bytes(weights: Sequence[Weight]) -> int:
    """An upper bound of the memory that the packed weights take: as floats, in whole panels."""
    return sum(4 * (-(-w.rows // _PANEL) * _PANEL) * w.columns + _ALIGNMENT for w in weights)


def _stack(parts: Sequence[NDArray[T]], paired: bool) -> NDArray[T]:
    if not paired:
        return np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])
    turns = [part.reshape(-1, _HALF_PANEL, part.shape[1]) for part in parts]
    return np.ascontiguousarray(np.stack(turns, axis=1).reshape(-1, parts[0].shape[1]))
