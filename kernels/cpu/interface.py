"""What the compiled module offers, as types. Arrays are C-contiguous; the core keeps hold of them.

Everything that cannot be is refused with a ValueError: at building with the number of the operation at fault,
in a step before any page is touched.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
Numbers = NDArray[np.int32]
View = tuple[int, int, int]
"""Columns of a buffer: (buffer, first column, width)."""
RESULT = -1
"""The buffer that stands for the caller's memory for logits."""


class CoreEngine(Protocol):
    """A program being built, then planned, bound to pages, and run."""

    @property
    def isa(self) -> str: ...

    def buffer(self, width: int, picked: bool, quantised: bool) -> int: ...
    def weight(
        self, form: str, rows: int, columns: int, half: bool, minima: bool, group: int, data: Codes
    ) -> int:
        """`group`: inputs that share a scale, 32 or 16; `half`: scales and minima as f16, of 32 only."""

    def vector(self, values: Floats) -> int: ...
    def rope_table(self, cosines: Floats, sines: Floats) -> int: ...

    def embed(self, weight: int, scale: float, out: View) -> None: ...
    def norm(self, x: View, vector: int, epsilon: float, size: int, out: View, picked: bool) -> None: ...
    def quantise(self, x: View, out: View, picked: bool) -> None: ...
    def product(self, x: View, weight: int, bias: int, epilogue: str, out: View, picked: bool) -> None:
        """`bias` -1: none. `epilogue`: "store", "add" (onto out), "silu_gate", "gelu_gate" (8 of each)."""

    def rope(self, x: View, heads: int, dim: int, table: int, interleaved: bool) -> None:
        """In place."""

    def write_kv(
        self, k: View, v: View, heads: int, dim: int, k_offset: int, v_offset: int, scale_offset: int
    ) -> None:
        """Offsets are of planes in a page. `scale_offset` counts in 8-bit pages only: [heads][tokens][2] f32,
        the scales of a key and of its value."""

    def attend(
        self,
        q: View,
        heads: int,
        shared: int,
        dim: int,
        scale: float,
        window: int,
        cap: float,
        k_offset: int,
        v_offset: int,
        scale_offset: int,
        out: View,
    ) -> None: ...
    def gate(self, kind: str, x: View, y: View, out: View, picked: bool) -> None: ...
    def add(self, x: View, y: View, out: View, picked: bool) -> None: ...
    def pick(self, x: View, out: View) -> None: ...

    def plan(self, rows: int, context: int) -> int:
        """Lays out memory for `rows` rows at a time (longer steps run in parts); bytes of it."""

    def bind(self, arena: Codes, pages: int, page_bytes: int, page_tokens: int, dtype: str) -> None: ...
    def step(
        self,
        tokens: Numbers,
        starts: Numbers,
        counts: Numbers,
        logits: Numbers,
        page_starts: Numbers,
        pages: Numbers,
        out: Floats,
    ) -> None:
        """Runs without the GIL. `page_starts` [slices + 1] cuts `pages` into the slices' tables."""

    def abort(self) -> None:
        """Ends the step that runs, at its next operation, with a ValueError. From any thread."""


class Core(Protocol):
    def Engine(self, threads: int, isa: str, cpus: Sequence[int] = ()) -> CoreEngine:
        """`isa` "": the best that this processor has. `cpus`: where thread 0, 1, … stay; empty: anywhere."""

    def packed_bytes(
        self, form: str, rows: int, columns: int, half: bool, minima: bool, group: int
    ) -> int: ...
    def pack_codes(
        self,
        form: str,
        half: bool,
        group: int,
        codes: Codes,
        scales: Floats,
        minima: Floats | None,
        out: Codes,
    ) -> None: ...
    def pack_floats(self, values: Floats, out: Codes) -> None: ...
    def pack_halves(self, form: str, values: Halves, out: Codes) -> None:
        """`values` are the bits of "f16" or "bf16"."""

    def fits_half(self, values: Floats) -> bool: ...
    def best_isa(self) -> str: ...
    def has_isa(self, isa: str) -> bool: ...
    def run_exp(self, isa: str, x: Floats, out: Floats) -> None: ...
    def run_store(self, isa: str, x: Floats, dtype: str, out: Codes) -> None:
        """ "int8": codes, then their scale."""

    def run_peak_int8(self, isa: str, rounds: int) -> float:
        """Integer operations done in that many rounds, without the GIL; 0 where it cannot be measured."""

    def read_all(self, data: Codes) -> int:
        """Reads every byte once, without the GIL."""
