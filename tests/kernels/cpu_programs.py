"""Small programs for the CPU core, each around one kernel, run over rows that a table holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import load
from kernels.cpu.interface import CoreEngine

Floats = NDArray[np.float32]
ISAS = [isa for isa in ("portable", "avx2", "vnni", "neon") if load().has_isa(isa)]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Coded:
    """A random matrix of codes."""

    form: str
    half: bool
    codes: NDArray[np.uint8]
    scales: Floats
    minima: Floats | None

    @classmethod
    def random(
        cls, form: str, rows: int, columns: int, *, half: bool, minima: bool, group: int = 32
    ) -> "Coded":
        numbers = np.random.default_rng([rows, columns])
        codes = numbers.integers(0, 16 if form == "u4" else 256, (rows, columns)).astype(np.uint8)
        tables = [numbers.standard_normal((rows, columns // group)).astype(np.float32) for _ in range(2)]
        if half:
            tables = [table.astype(np.float16).astype(np.float32) for table in tables]
        return cls(form, half, codes, tables[0], tables[1] if minima else None)

    @property
    def group(self) -> int:
        return int(self.codes.shape[1] // self.scales.shape[1])

    @property
    def signed(self) -> NDArray[Any]:
        return self.codes.view(np.int8) if self.form == "i8" else self.codes

    @property
    def values(self) -> NDArray[np.float64]:
        values = self.signed * np.repeat(self.scales.astype(np.float64), self.group, axis=1)
        return values if self.minima is None else values + np.repeat(self.minima, self.group, axis=1)

    def add(self, engine: CoreEngine) -> int:
        rows, columns = self.codes.shape
        with_minima = self.minima is not None
        size = load().packed_bytes(self.form, rows, columns, self.half, with_minima, self.group)
        out = np.zeros(size, np.uint8)
        load().pack_codes(self.form, self.half, self.group, self.codes, self.scales, self.minima, out)
        return engine.weight(self.form, rows, columns, self.half, with_minima, self.group, out)


def add_floats(engine: CoreEngine, values: Floats) -> int:
    rows, columns = values.shape
    out = np.zeros(load().packed_bytes("f32", rows, columns, False, False, 32), np.uint8)
    load().pack_floats(values, out)
    return engine.weight("f32", rows, columns, False, False, 32, out)


def to_halves(values: Floats, form: str) -> tuple[NDArray[np.uint16], Floats]:
    """Bits of "f16" or "bf16", and the numbers that they are."""
    if form == "f16":
        halves = values.astype(np.float16)
        return halves.view(np.uint16), halves.astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def add_halves(engine: CoreEngine, bits: NDArray[np.uint16], form: str) -> int:
    rows, columns = bits.shape
    out = np.zeros(load().packed_bytes(form, rows, columns, False, False, 32), np.uint8)
    load().pack_halves(form, bits, out)
    return engine.weight(form, rows, columns, False, False, 32, out)


def numbers(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class Rows:
    """An engine whose program begins with `x`, one row per token."""

    def __init__(self, x: Floats, *, isa: str = "", threads: int = 1) -> None:
        self.engine = load().Engine(threads, isa)
        self.count, self.width = x.shape
        self.x = (self.engine.buffer(self.width, False, False), 0, self.width)
        self.engine.embed(add_floats(self.engine, x), 1.0, self.x)

    def picked(self) -> tuple[int, int, int]:
        view = (self.engine.buffer(self.width, True, False), 0, self.width)
        self.engine.pick(self.x, view)
        return view

    def run(self, width: int, *, rows_at_once: int = 64, parts: Sequence[int] | None = None) -> Floats:
        """All rows' results, the rows cut into slices of these sizes."""
        self.engine.plan(rows_at_once, 1 << 14)
        self.engine.bind(np.zeros(64, np.uint8), 1, 64, 64, "f32")
        sizes = [self.count] if parts is None else list(parts)
        out = np.full((self.count, width), np.nan, np.float32)
        needed = [-(-size // 64) for size in sizes]
        self.engine.step(
            np.arange(self.count, dtype=np.int32),
            numbers(*[0] * len(sizes)),
            numbers(*sizes),
            numbers(*sizes),
            numbers(0, *np.cumsum(needed)),
            np.zeros(sum(needed), np.int32),
            out,
        )
        return out


def product(
    x: Floats,
    weight: Coded | Floats,
    *,
    isa: str,
    form: str = "f32",
    threads: int = 1,
    rows_at_once: int = 64,
) -> Floats:
    rows = Rows(x, isa=isa, threads=threads)
    view = rows.picked()
    if isinstance(weight, Coded):
        index, outputs = weight.add(rows.engine), len(weight.codes)
        quantised = (rows.engine.buffer(rows.width, True, True), 0, rows.width)
        rows.engine.quantise(view, quantised, True)
        view = quantised
    elif form == "f32":
        index, outputs = add_floats(rows.engine, weight), len(weight)
    else:
        index, outputs = add_halves(rows.engine, to_halves(weight, form)[0], form), len(weight)
    rows.engine.product(view, index, -1, "store", (-1, 0, outputs), True)
    return rows.run(outputs, rows_at_once=rows_at_once)
