"""x · Wᵀ with rows that do not depend on each other.

oneDNN's packed weights make a single row as fast as memory allows and, where verified, give the same bits
for every number of rows; elsewhere plain torch products of verified sizes; at worst row by row.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.reference.rows import pieces


class Product(Protocol):
    """One weight matrix, ready to be multiplied with."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, columns] -> [rows, outputs]; rows may be any number of the verified sizes."""


class PackedProduct:
    """Weights in the order that oneDNN wants. Raises RuntimeError where torch was built without it."""

    kind = "packed"

    def __init__(self, weight: Tensor) -> None:
        # Private operations of torch (what its own compiler emits): the version is pinned for it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self._run = torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(x, self._weight, None, "none", [], "")
        return out


class PlainProduct:
    """Weights as they are."""

    kind = "plain"

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._weight)


def multiply(x: Tensor, product: Product, sizes: tuple[int, ...], outputs: int) -> Tensor:
    """[rows, columns] -> [rows, outputs], in pieces of verified sizes."""
    rows = x.shape[0]
    if rows in sizes:
        return product(x)
    out = torch.empty(rows, outputs)
    start = 0
    for taken, size in pieces(rows, sizes):
        part = x[start : start + taken]
        if taken < size:
            padded = torch.zeros(size, x.shape[1])
            padded[:taken] = part
            out[start:] = product(padded)[:taken]
        else:
            out[start : start + taken] = product(part)
        start += taken
    return out
