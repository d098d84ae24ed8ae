"""The tensor types of ggml: how many elements one block holds and how many bytes it takes.

Knows sizes only. How the bytes of a block turn into numbers is the engine's business.
"""

from __future__ import annotations

from enum import IntEnum


class GgmlType(IntEnum):
    """Type ids as they are written in GGUF files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40

    @property
    def block_size(self) -> int:
        """Elements in one block (1 for plain numbers)."""
        return _SIZES[self][0]

    @property
    def type_size(self) -> int:
        """Bytes of one block."""
        return _SIZES[self][1]


_SIZES: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 2 + 16),
    GgmlType.Q4_1: (32, 2 + 2 + 16),
    GgmlType.Q5_0: (32, 2 + 4 + 16),
    GgmlType.Q5_1: (32, 2 + 2 + 4 + 16),
    GgmlType.Q8_0: (32, 2 + 32),
    GgmlType.Q8_1: (32, 2 + 2 + 32),
    GgmlType.Q2_K: (256, 2 + 2 + 16 + 64),
    GgmlType.Q3_K: (256, 2 + 12 + 32 + 64),
    GgmlType.Q4_K: (256, 2 + 2 + 12 + 128),
    GgmlType.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
    GgmlType.Q6_K: (256, 2 + 16 + 64 + 128),
    GgmlType.Q8_K: (256, 4 + 256 + 32),
    GgmlType.IQ2_XXS: (256, 2 + 64),
    GgmlType.IQ2_XS: (256, 2 + 64 + 8),
    GgmlType.IQ3_XXS: (256, 2 + 64 + 32),
    GgmlType.IQ1_S: (256, 2 + 32 + 16),
    GgmlType.IQ4_NL: (32, 2 + 16),
    GgmlType.IQ3_S: (256, 2 + 64 + 8 + 32 + 4),
    GgmlType.IQ2_S: (256, 2 + 64 + 16),
    GgmlType.IQ4_XS: (256, 2 + 2 + 4 + 128),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 32 + 16 + 8),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 48 + 4 + 2),
    GgmlType.TQ2_0: (256, 64 + 2),
    GgmlType.MXFP4: (32, 1 + 16),
    GgmlType.NVFP4: (64, 4 + 32),
}
