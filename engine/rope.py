"""Rotary positions: how fast each pair of a head turns, and by what angle at each position.

One place for all variants and executors: none, linear, dynamic (Qwen 1), yarn, and any set of divisors of the
frequencies (llama3 and longrope are such sets; a GGUF file carries them as a tensor).
YaRN: https://arxiv.org/abs/2309.00071. Knows nothing of files or programs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
TurnKind = Literal["none", "linear", "dynamic", "yarn"]


@dataclass(frozen=True, slots=True)
class Turns:
    """Every parameter of a rope but the divisors."""

    dim: int
    """Numbers of a head; half as many pairs."""
    base: float
    kind: TurnKind = "none"
    factor: float = 1.0
    original: int = 0
    """Positions that the model was trained on, where the kind asks for it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    """cos and sin are multiplied by this."""


def frequencies(turns: Turns, divisors: Floats | None = None, *, length: int = 0) -> Floats:
    """Radians per position of each pair, float32 [dim / 2]. `length`: all positions, for "dynamic"."""
    exponents = np.arange(0, turns.dim, 2, dtype=np.float32) / np.float32(turns.dim)
    base = turns.base
    if turns.kind == "dynamic" and length > turns.original:
        stretch = turns.factor * length / turns.original - (turns.factor - 1)
        base *= stretch ** (turns.dim / (turns.dim - 2))
    found = (1.0 / np.power(np.float64(base), exponents)).astype(np.float32)
    if divisors is not None:
        found = found / divisors.astype(np.float32)
    if turns.kind == "linear":
        found = found / np.float32(turns.factor)
    if turns.kind == "yarn":
        kept = 1 - _ramp(turns)
        found = found / np.float32(turns.factor) * (1 - kept) + found * kept
    result: Floats = found.astype(np.float32)
    return result


def _ramp(turns: Turns) -> Floats:
    """0 where a pair turns fast enough to be left alone, 1 where it is slowed down by the factor."""

    def pair_that_turns(times: float) -> float:
        return turns.dim * math.log(turns.original / (times * 2 * math.pi)) / (2 * math.log(turns.base))

    low, high = pair_that_turns(turns.beta_fast), pair_that_turns(turns.beta_slow)
    if turns.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turns.dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(turns.dim // 2, dtype=np.float32)
    ramp: Floats = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    return ramp


def llama3_divisors(
    base: float, dim: int, *, factor: float, low: float, high: float, original: int
) -> Floats:
    """What Llama 3.1 divides its frequencies by: nothing for short waves, `factor` for long ones, and between
    them a blend of the two frequencies."""
    plain = frequencies(Turns(dim, base)).astype(np.float64)
    turns = original * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def rope_table(positions: int, turns: Turns, divisors: Floats | None = None) -> tuple[Floats, Floats]:
    """cos and sin for every position and pair, each float32 [positions, dim / 2].

    Angles in float32 as the published implementations have them; cos and sin of those in float64.
    """
    speeds = frequencies(turns, divisors, length=positions)
    angles = np.outer(np.arange(positions, dtype=np.float32), speeds).astype(np.float64)
    return (
        (np.cos(angles) * turns.magnitude).astype(np.float32),
        (np.sin(angles) * turns.magnitude).astype(np.float32),
    )


def yarn_magnitude(factor: float, log_scale: float = 1.0) -> float:
    """0.1 ln(factor) + 1: how much sharper attention is made where positions are squeezed."""
    return 1.0 if factor <= 1 else 0.1 * log_scale * math.log(factor) + 1.0


def longrope_magnitude(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def describe(turns: Sequence[Turns], divisors: bool, style: str) -> str:
    """Canonical text: part of what makes pages equal. The divisors themselves are part of the weights."""
    return f"{style} {'; '.join(map(repr, turns))} divisors={divisors}"
