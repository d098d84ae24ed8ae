"""Norm, rope, gate. Built only from operations that IEEE 754 rounds exactly, and from exp and sums along a
row, whose independence of the other rows is checked at start-up: the vectorised and the left-over part of
anything else may differ in the last bit.
"""

import numpy as np
import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension."""
    mean = (x * x).sum(-1, keepdim=True).div_(x.shape[-1]).add_(epsilon)
    return (x / mean.sqrt_()).mul_(weight)


def rope_table(
    positions: int, dim: int, base: float, factors: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """cos and sin for every position and pair, each float32 [positions, dim / 2].

    Angles in float32 as the published implementations have them; cos and sin of those in float64.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = (1.0 / np.power(np.float64(base), exponents)).astype(np.float32)
    if factors is not None:
        frequencies = frequencies / factors.numpy().astype(np.float32)
    places = (np.arange(positions, dtype=np.float64) * scale).astype(np.float32)
    angles = np.outer(places, frequencies).astype(np.float64)
    return (
        torch.from_numpy(np.cos(angles).astype(np.float32)),
        torch.from_numpy(np.sin(angles).astype(np.float32)),
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turns every pair of x [rows, heads, dim] by cos and sin [rows, 1, dim / 2]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    if interleaved:
        a, b, out_a, out_b = x[..., 0::2], x[..., 1::2], out[..., 0::2], out[..., 1::2]
    else:
        a, b, out_a, out_b = x[..., :half], x[..., half:], out[..., :half], out[..., half:]
    torch.sub(a * cos, b * sin, out=out_a)
    torch.add(a * sin, b * cos, out=out_b)
    return out


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up"""
    return (gate / torch.neg(gate).exp_().add_(1.0)).mul_(up)


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit codes over the last dimension, to the nearest, as int8; and their scales.

    Where a number is not finite, the scale is none either.
    """
    largest = x.abs().amax(-1, keepdim=True)
    tiny = largest < 1e-35
    scale = torch.where(tiny, 0.0, largest / 127) + (x * 0.0).sum(-1, keepdim=True)
    codes = (x * torch.where(tiny, 0.0, 127 / largest)).round_().nan_to_num_(0.0, 0.0, 0.0)
    return codes.to(torch.int8), scale.squeeze(-1)
