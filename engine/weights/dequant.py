"""Stored blocks to float32, bit for bit as ggml's dequantize_row_* do it.

Every operation is a float32 multiplication or addition in ggml's own order: with another order the last
bit differs. Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
Knows nothing of files or tensors; a row is a whole number of blocks.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.errors import WeightError
from text.gguf import GgmlType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_BLOCKS_AT_ONCE = 1 << 14

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def supported(type_: GgmlType) -> bool:
    return type_ in _BLOCKS


def dequantise(data: memoryview | Bytes, type_: GgmlType) -> Floats:
    """All values in `data`, flat. Raises WeightError for an unknown type or a broken block."""
    expand = _BLOCKS.get(type_)
    if expand is None:
        raise WeightError(f"{type_.name} blocks cannot be read")
    raw = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data.reshape(-1)
    if len(raw) % type_.type_size:
        raise WeightError(f"{len(raw)} bytes are no whole number of {type_.name} blocks")
    blocks = raw.reshape(-1, type_.type_size)
    values = np.empty((len(blocks), type_.block_size), np.float32)
    step = max(1, _BLOCKS_AT_ONCE * 32 // type_.block_size)
    # Scales of a hostile file may be infinite; the caller refuses what comes out.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            expand(blocks[start : start + step], values[start : start + step])
    return values.reshape(-1)


def _half(blocks: Bytes, offset: int) -> Floats:
    """The f16 at `offset` of each block. [blocks, 1]"""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: Bytes) -> Bytes:
    """Low halves of all bytes, then high halves. [blocks, n] -> [blocks, 2n]"""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _bits(blocks: Bytes, offset: int) -> Bytes:
    """The 32 bits at `offset`, least significant first. [blocks, 32]"""
    return np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = np.ascontiguousarray(blocks).view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    out[:] = (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    codes = _nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    np.multiply(codes, _half(blocks, 0), out=out)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks, 2) << 4)
    np.multiply(codes.astype(np.float32) - np.float32(16), _half(blocks, 0), out=out)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks, 4) << 4)
    np.multiply(codes, _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _grouped(out: Floats, groups: int) -> Floats:
    """The same memory as [blocks, groups, values of a group]."""
    return out.reshape(len(out), groups, -1)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    # 16 bytes scale|min of 16 groups of 16; 64 bytes of 2-bit codes; d; dmin.
    scales = blocks[:, :16]
    d, least = _half(blocks, 80), _half(blocks, 82)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    codes = (blocks[:, 16:80].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(len(blocks), 16, 16)
    target = _grouped(out, 16)
    np.multiply(codes, (d * (scales & 15))[:, :, None], out=target)
    target -= (least * (scales >> 4))[:, :, None]


def _q3_k_scales(blocks: Bytes) -> NDArray[np.int8]:
    """The sixteen 6-bit scales of each block. [blocks, 16]"""
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[None, :, None] & 3).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def _q3_k(blocks: Bytes, out: Floats) -> None:
    # 32 bytes of high bits; 64 bytes of low 2 bits; 12 bytes with 16 6-bit scales; d.
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    codes = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    above = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    signed = (codes.astype(np.int8) - ((above ^ 1) << 2).astype(np.int8)).reshape(-1, 16, 16)
    np.multiply(signed, (_half(blocks, 108) * _q3_k_scales(blocks))[:, :, None], out=_grouped(out, 16))


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes. Each [blocks, 8]"""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _q4_k(blocks: Bytes, out: Floats) -> None:
    # d; dmin; 12 bytes of scales; 128 bytes: per 64 values 32 low then 32 high nibbles.
    scales, minima = _k_scales(blocks[:, 4:16])
    shifts = np.array([0, 4], np.uint8)[None, None, :, None]
    codes = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> shifts & 15).reshape(-1, 8, 32)
    target = _grouped(out, 8)
    np.multiply(codes, (_half(blocks, 0) * scales)[:, :, None], out=target)
    target -= (_half(blocks, 2) * minima)[:, :, None]


def _q5_k(blocks: Bytes, out: Floats) -> None:
    # As Q4_K, with 32 bytes of fifth bits before the nibbles.
    scales, minima = _k_scales(blocks[:, 4:16])
    shifts = np.array([0, 4], np.uint8)[None, None, :, None]
    codes = (blocks[:, 48:].reshape(-1, 4, 1, 32) >> shifts & 15).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    target = _grouped(out, 8)
    np.multiply(codes | fifth << 4, (_half(blocks, 0) * scales)[:, :, None], out=target)
    target -= (_half(blocks, 2) * minima)[:, :, None]


def _q6_k(blocks: Bytes, out: Floats) -> None:
    # 128 bytes of low nibbles; 64 bytes of high 2 bits; 16 int8 scales; d.
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low.reshape(-1, 8, 32) | high.reshape(-1, 8, 32) << 4).astype(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8)
    np.multiply(codes.reshape(-1, 16, 16), (_half(blocks, 208) * scales)[:, :, None], out=_grouped(out, 16))


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    np.multiply(_IQ4[_nibbles(blocks[:, 2:])], _half(blocks, 0), out=out)


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    # d; 16 high bit pairs of the scales; 8 low nibbles of them; 128 bytes of codes.
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    shifts = np.array([0, 4], np.uint8)[None, None, :, None]
    codes = (blocks[:, 8:].reshape(-1, 8, 1, 16) >> shifts & 15).reshape(-1, 8, 32)
    np.multiply(_IQ4[codes], (_half(blocks, 0) * scales)[:, :, None], out=_grouped(out, 8))


_BLOCKS: dict[GgmlType, Callable[[Bytes, Floats], None]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _f16,
    GgmlType.BF16: _bf16,
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
