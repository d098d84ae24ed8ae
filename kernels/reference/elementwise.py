"""Norm, rope, gate. Built only from operations that IEEE 754 rounds exactly, and from exp and sums along a
row, whose independence of the other rows is checked at start-up: the vectorised and the left-over part of
anything else may differ in the last bit.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension."""
    mean = (x * x).sum(-1, keepdim=True).div_(x.shape[-1]).add_(epsilon)
    return (x / mean.sqrt_()).mul_(weight)


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


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """0.5 gate (1 + tanh(u)) * up, u = sqrt(2/pi) (gate + 0.044715 gate³), as gate / (1 + exp(-2u)) * up"""
    inner = (gate * gate).mul_(0.044715).add_(1.0).mul_(gate).mul_(-2 * math.sqrt(2 / math.pi))
    return (gate / inner.exp_().add_(1.0)).mul_(up)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), as cap * (1 - 2 / (1 + exp(2 x / cap)))"""
    return torch.reciprocal((x * (2 / cap)).exp_().add_(1.0)).mul_(-2.0).add_(1.0).mul_(cap)
