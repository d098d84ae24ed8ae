"""The checks that row invariance rests on, made once at start-up on the shapes of the model at hand.

A check compares bits: the same rows in pieces of another size, at another place, in other company. Sizes
that disagree are not used. What the checks saw is hashed: two processes whose hashes agree round alike on
every shape, so the hash is part of what makes their pages equal.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.reference.attention import CHUNK, Batched
from kernels.reference.rows import BASE_ROWS, CANDIDATES

_BATCHES = (1, 2, 3, 7, 33)


class Evidence:
    """Collects the bits that the checks saw."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def add(self, values: Tensor) -> None:
        self._hash.update(values.contiguous().numpy().tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    )


def agreeing_sizes(
    run: Callable[[Tensor], Tensor], columns: int, evidence: Evidence, *, most: int = CANDIDATES[-1]
) -> tuple[int, ...] | None:
    """Numbers of rows that give the bits that BASE_ROWS gives; None if that fails itself."""
    rows = numbers(0, BASE_ROWS, columns)
    expected = run(rows)
    rolled = run(rows.roll(5, 0))
    alone = rows.clone()
    alone[1::2] = 0
    if not same_bits(rolled, expected.roll(5, 0)) or not same_bits(run(alone)[0::2], expected[0::2]):
        return None
    evidence.add(expected)
    return tuple(size for size in CANDIDATES if size <= most and _agrees(run, rows, expected, size))


def _agrees(run: Callable[[Tensor], Tensor], rows: Tensor, expected: Tensor, size: int) -> bool:
    if size >= BASE_ROWS:
        repeats = size // BASE_ROWS
        return same_bits(run(rows.repeat(repeats, 1)), expected.repeat(repeats, 1))
    starts = range(0, BASE_ROWS - size + 1, max(size, 5))
    return all(
        same_bits(run(rows[start : start + size].clone()), expected[start : start + size]) for start in starts
    )


def one_at_a_time(a: Tensor, b: Tensor) -> Tensor:
    """Batched product without a batch, for a torch whose batches are not independent."""
    return torch.stack([torch.mm(a[i], b[i]) for i in range(len(a))])


def attention_sizes(shared: int, dim: int, evidence: Evidence) -> tuple[tuple[int, ...], Batched]:
    """Rows per tile for which both products of attention agree, and how to run them.

    `shared` query heads read one key head of `dim` numbers.
    """
    queries = numbers(1, BASE_ROWS * shared, dim)
    weights = numbers(2, BASE_ROWS * shared, CHUNK)
    k, v = numbers(3, CHUNK, dim), numbers(4, CHUNK, dim)
    evidence.add(torch.mm(queries, k.t()))
    sizes: list[int] = []
    for size in (*CANDIDATES[: CANDIDATES.index(64)], 64):
        good = all(
            _batch_agrees(x, y, size * shared, batch, transposed)
            for x, y, transposed in ((queries, k, True), (weights, v, False))
            for batch in _BATCHES
        )
        if good:
            sizes.append(size)
    if BASE_ROWS in sizes:
        return tuple(sizes), torch.bmm
    return (BASE_ROWS,), one_at_a_time


def _batch_agrees(x: Tensor, y: Tensor, lines: int, batch: int, transposed: bool) -> bool:
    """Whether `lines` lines of x, in a batch, give what all of x gives in a batch of one."""
    other = y.t() if transposed else y
    expected = torch.bmm(x[None], other[None])[0]
    repeats = -(-lines // len(x))
    rows, wanted = x.repeat(repeats, 1)[:lines], expected.repeat(repeats, 1)[:lines]
    left = numbers(5, batch * lines, x.shape[1]).view(batch, lines, -1)
    right = numbers(6, batch * y.shape[0], y.shape[1]).view(batch, *y.shape)
    for place in {0, batch // 2, batch - 1}:
        left[place], right[place] = rows, y
    found = torch.bmm(left, right.transpose(1, 2) if transposed else right)
    return all(same_bits(found[place], wanted) for place in {0, batch // 2, batch - 1})


def elementwise_problem(widths: set[int], evidence: Evidence) -> str | None:
    """What is wrong with exp or sum in this torch, or None."""
    source = numbers(7, 1, 1 << 17)[0] * 20
    expected = source.exp()
    evidence.add(expected)
    for start, count in ((1, 1), (3, 5), (7, 63), (13, 1001), (64, 40_000), (11, 100_003)):
        if not same_bits(source[start : start + count].clone().exp_(), expected[start : start + count]):
            return "exp of a number depends on its place"
    if float(torch.zeros(1).exp()) != 1.0 or float(torch.full((1,), -1e30).exp()) != 0.0:
        return "exp(0) is not 1, or exp of a very small number is not 0"
    for width in sorted(widths | {CHUNK}):
        rows = numbers(8, 130, width)
        sums = rows.sum(-1, keepdim=True)
        evidence.add(sums)
        for start, count in ((0, 1), (5, 2), (9, 3), (1, 7), (17, 16), (3, 100), (0, 129)):
            part = rows[start : start + count].clone()
            if not same_bits(part.sum(-1, keepdim=True), sums[start : start + count]):
                return f"the sum of {width} numbers depends on how many rows there are"
    return None


def numbers(stream: int, rows: int, columns: int) -> Tensor:
    """Fixed normal numbers; from numpy, since torch's own generator may change. [rows, columns]"""
    bits: Any = np.random.Philox(key=[0x6B766D657368, stream])
    return torch.from_numpy(np.random.Generator(bits).standard_normal((rows, columns), dtype=np.float32))
