"""Stored blocks as codes with a scale and perhaps a minimum per group of 32 or 16, to compute on as they are.

value = scale * code + minimum, exactly the stored value; f16 and bf16 are kept as they are, floats have no
such form: None. Knows nothing of how codes are laid out for computing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.weights.dequant import _IQ4, _bits, _half, _k_scales, _nibbles, _q3_k_scales
from engine.weights.source import Floats
from text.gguf import GgmlType

Bytes = NDArray[np.uint8]
CodeForm = Literal["u4", "i8"]
GROUP = 32
"""Columns are a whole number of these, whatever the groups."""


@dataclass(frozen=True, slots=True)
class Codes:
    """`codes` [rows, columns]: 0..15 for "u4", int8 as bytes for "i8"; the others [rows, columns / group]."""

    form: CodeForm
    codes: Bytes
    scales: Floats
    minima: Floats | None

    @property
    def group(self) -> int:
        """Inputs that share a scale: 32 or 16."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.scales).all()) and (
            self.minima is None or bool(np.isfinite(self.minima).all())
        )


@dataclass(frozen=True, slots=True)
class Halves:
    """A matrix stored as "f16" or "bf16", bit for bit: `values` [rows, columns]."""

    form: Literal["f16", "bf16"]
    values: NDArray[np.uint16]

    @property
    def finite(self) -> bool:
        exponent = np.uint16(0x7C00 if self.form == "f16" else 0x7F80)
        return not ((self.values & exponent) == exponent).any()


def halves(data: memoryview, type_: GgmlType, rows: int) -> Halves | None:
    """The numbers of a matrix of `rows` rows, or None where its type is not two bytes wide."""
    form = _HALVES.get(type_)
    return None if form is None else Halves(form, np.frombuffer(data, np.uint16).reshape(rows, -1))


def codes(data: memoryview, type_: GgmlType, rows: int) -> Codes | None:
    """The codes of a matrix of `rows` rows, or None where its type has none."""
    read = _READERS.get(type_)
    if read is None:
        return None
    blocks = np.frombuffer(data, np.uint8).reshape(-1, type_.type_size)
    with np.errstate(all="ignore"):
        form, values, scales, minima = read(blocks)
    return Codes(
        form,
        np.ascontiguousarray(values).view(np.uint8).reshape(rows, -1),
        np.ascontiguousarray(scales, dtype=np.float32).reshape(rows, -1),
        None if minima is None else np.ascontiguousarray(minima, dtype=np.float32).reshape(rows, -1),
    )


_HALVES: dict[GgmlType, Literal["f16", "bf16"]] = {GgmlType.F16: "f16", GgmlType.BF16: "bf16"}
_Read = tuple[CodeForm, NDArray[np.uint8] | NDArray[np.int8], Floats, Floats | None]


def _q4_0(blocks: Bytes) -> _Read:
    scale = _half(blocks, 0)
    return "u4", _nibbles(blocks[:, 2:]), scale, scale * np.float32(-8)


def _q4_1(blocks: Bytes) -> _Read:
    return "u4", _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> _Read:
    values = _nibbles(blocks[:, 6:]) | (_bits(blocks, 2) << 4)
    return "i8", values.view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Read:
    return "i8", _nibbles(blocks[:, 8:]) | (_bits(blocks, 4) << 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> _Read:
    return "i8", blocks[:, 2:], _half(blocks, 0), None


def _q4_k(blocks: Bytes) -> _Read:
    scales, minima = _k_scales(blocks[:, 4:16])
    shifts = np.array([0, 4], np.uint8)[None, None, :, None]
    values = blocks[:, 16:].reshape(-1, 4, 1, 32) >> shifts & 15
    return "u4", values, _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> _Read:
    scales, minima = _k_scales(blocks[:, 4:16])
    shifts = np.array([0, 4], np.uint8)[None, None, :, None]
    low = (blocks[:, 48:].reshape(-1, 4, 1, 32) >> shifts & 15).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    return "i8", low | fifth << 4, _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q2_k(blocks: Bytes) -> _Read:
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    values = blocks[:, 16:80].reshape(-1, 2, 1, 32) >> shifts & 3
    scales = blocks[:, :16]
    return "u4", values, _half(blocks, 80) * (scales & 15), -(_half(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Bytes) -> _Read:
    # Codes from -4 on become codes from 0 on; (code + 4) * scale needs 20 bits, so nothing is rounded.
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    above = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    scales = _half(blocks, 108) * _q3_k_scales(blocks)
    return "u4", low | above << 2, scales, scales * np.float32(-4)


def _q6_k(blocks: Bytes) -> _Read:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    values = (low.reshape(-1, 8, 32) | high.reshape(-1, 8, 32) << 4).view(np.int8) - np.int8(32)
    return "i8", values, _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


_IQ4_CODES = _IQ4.astype(np.int8)


def _iq4_nl(blocks: Bytes) -> _Read:
    return "i8", _IQ4_CODES[_nibbles(blocks[:, 2:])], _half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> _Read:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    shifts = np.array([0, 4], np.uint8)[None, None, :, None]
    values = (blocks[:, 8:].reshape(-1, 8, 1, 16) >> shifts & 15).reshape(-1, 8, 32)
    return "i8", _IQ4_CODES[values], _half(blocks, 0) * scales, None


_READERS: dict[GgmlType, Callable[[Bytes], _Read]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.IQ4_XS: _iq4_xs,
}
