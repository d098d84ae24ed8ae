"""Makes a pack: reads weights, stacks them, packs them into the core's forms, on several threads at a time.

Only some parts are ever in memory besides the result. Knows nothing of operations or of where packs lie.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.cpu.pack import Bytes, Form, Index, Matrix, MatrixKey, RopeKey, RopeTables, Vector, Wants
from engine.errors import WeightError
from engine.rope import rope_table
from engine.weights.codes import GROUP, Codes, Halves
from engine.weights.source import Floats, WeightSource
from kernels.cpu import Core

_HALF_PANEL = 8
PLAIN = Form("f32", False, GROUP)

Progress = Callable[[int, int], None]
"""Bytes done, and of how many."""
T = TypeVar("T", bound=np.generic)
A = TypeVar("A")
B = TypeVar("B")


@runtime_checkable
class CodeSource(Protocol):
    """A source that can give stored codes and halves as they are."""

    def codes(self, name: str, rows: int | None = None) -> Codes | Halves | None: ...


class Sink(Protocol):
    """Where the parts go, one after another."""

    def put(self, part: Bytes) -> int:
        """Keeps a copy; where it lies, a multiple of ALIGNMENT."""


def form_of(weights: WeightSource, name: str) -> Form:
    """The form that a matrix is packed in: its first row tells."""
    if not isinstance(weights, CodeSource):
        return PLAIN
    return _form(weights.codes(name, 1))


def _form(stored: Codes | Halves | None) -> Form:
    if isinstance(stored, Halves):
        return Form(stored.form, False, GROUP)
    if stored is None or stored.codes.shape[1] % GROUP:
        return PLAIN
    return Form(stored.form, stored.minima is not None, stored.group)


def pack(
    core: Core,
    weights: WeightSource,
    wants: Wants,
    sink: Sink,
    *,
    threads: int,
    progress: Progress = lambda done, total: None,
) -> Index:
    """Puts every part into the sink. Raises WeightError where a number is not finite."""
    packing = _Packing(core, weights)
    sizes = [sum(packing.stored_bytes(name) for name in key.names) for key in wants.matrices]
    done, total = 0, sum(sizes)
    matrices: dict[MatrixKey, Matrix] = {}
    for made, size in zip(_in_order(packing.matrix, wants.matrices, threads), sizes, strict=True):
        part = made.matrix(sink.put(made.data))
        matrices[part.key] = part
        done += size
        progress(done, total)
    vectors = {names: _vector(names, weights, sink) for names in wants.vectors}
    ropes = {key: _rope(key, weights, sink) for key in wants.ropes}
    return Index(wants.forms, matrices, vectors, ropes)


def _in_order(make: Callable[[A], B], items: Sequence[A], threads: int) -> Iterator[B]:
    """As `map`, ahead by no more than what keeps the threads busy."""
    with ThreadPoolExecutor(threads, thread_name_prefix="packing") as pool:
        pending: deque[Future[B]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(make, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@dataclass(frozen=True, slots=True)
class _Packed:
    key: MatrixKey
    form: Form
    rows: int
    columns: int
    half: bool
    data: Bytes

    def matrix(self, at: int) -> Matrix:
        return Matrix(self.key, self.form, self.rows, self.columns, self.half, at, len(self.data))


class _Packing:
    def __init__(self, core: Core, weights: WeightSource) -> None:
        self._core = core
        self._weights = weights

    def stored_bytes(self, name: str) -> int:
        """About what it costs to read, for progress: its numbers."""
        return int(np.prod(self._weights.shapes[name], dtype=np.int64))

    def matrix(self, key: MatrixKey) -> _Packed:
        read = [self._read(name) for name in key.names]
        try:
            return self._stacked(key, read)
        except ValueError as error:
            raise WeightError(f"tensor {' + '.join(key.names)} cannot be packed: {error}") from error

    def _read(self, name: str) -> Codes | Halves | Floats:
        stored = self._weights.codes(name) if isinstance(self._weights, CodeSource) else None
        if stored is None or _form(stored) == PLAIN:
            return self._weights.load(name)
        if not stored.finite:
            raise WeightError(f"tensor {name!r} holds values that are not finite")
        return stored

    def _stacked(self, key: MatrixKey, read: Sequence[Codes | Halves | Floats]) -> _Packed:
        first = read[0]
        if isinstance(first, Codes):
            coded = [part for part in read if isinstance(part, Codes)]
            minima = [part.minima for part in coded if part.minima is not None]
            return self._codes(
                key,
                _form(first),
                _stack([part.codes for part in coded], key.paired),
                _stack([part.scales for part in coded], key.paired),
                _stack(minima, key.paired) if minima else None,
            )
        if isinstance(first, Halves):
            bits = _stack([part.values for part in read if isinstance(part, Halves)], key.paired)
            made = self._numbers(key, _form(first), bits)
            self._core.pack_halves(first.form, bits, made.data)
            return made
        values = _stack([part for part in read if not isinstance(part, Codes | Halves)], key.paired)
        made = self._numbers(key, PLAIN, values)
        self._core.pack_floats(values, made.data)
        return made

    def _numbers(self, key: MatrixKey, form: Form, values: NDArray[Any]) -> _Packed:
        rows, columns = values.shape
        nbytes = self._core.packed_bytes(form.name, rows, columns, False, False, GROUP)
        return _Packed(key, form, rows, columns, False, np.empty(nbytes, np.uint8))

    def _codes(
        self, key: MatrixKey, form: Form, codes: NDArray[np.uint8], scales: Floats, minima: Floats | None
    ) -> _Packed:
        rows, columns = codes.shape
        fits = form.group == GROUP and self._core.fits_half(scales)
        half = fits and (minima is None or self._core.fits_half(minima))
        nbytes = self._core.packed_bytes(form.name, rows, columns, half, form.minima, form.group)
        out = np.empty(nbytes, np.uint8)
        self._core.pack_codes(form.name, half, form.group, codes, scales, minima, out)
        return _Packed(key, form, rows, columns, half, out)


def _stack(parts: Sequence[NDArray[T]], paired: bool) -> NDArray[T]:
    if not paired:
        return np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])
    turns = [part.reshape(-1, _HALF_PANEL, part.shape[1]) for part in parts]
    return np.ascontiguousarray(np.stack(turns, axis=1).reshape(-1, parts[0].shape[1]))


def _vector(names: tuple[str, ...], weights: WeightSource, sink: Sink) -> Vector:
    values = np.ascontiguousarray(np.concatenate([weights.load(name) for name in names]), np.float32)
    return Vector(names, sink.put(values.view(np.uint8)), values.nbytes)


def _rope(key: RopeKey, weights: WeightSource, sink: Sink) -> RopeTables:
    divisors = None if key.divisors is None else weights.load(key.divisors)
    both = np.stack(rope_table(key.positions, key.turns, divisors))
    raw = both.view(np.uint8).reshape(-1)
    return RopeTables(key, blake2b(raw.data, digest_size=8).hexdigest(), sink.put(raw), both.nbytes)
