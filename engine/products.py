"""Weights bound to the reference backend's products: stacked, packed, checked once per shape.

Knows nothing of steps.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.program import LOGIT_ROWS, Linear, Weight
from engine.weights.source import Floats, WeightSource
from kernels.reference.invariance import Evidence, agreeing_sizes
from kernels.reference.products import PackedProduct, PlainProduct, Product, multiply
from kernels.reference.rows import CANDIDATES

_LOGIT_ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class BoundProduct:
    product: Product
    sizes: tuple[int, ...]
    outputs: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out = multiply(x, self.product, self.sizes, self.outputs)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class _Way:
    """How products of one shape are run."""

    kind: type[PackedProduct] | type[PlainProduct]
    sizes: tuple[int, ...]


class ProductShelf:
    """Makes products; remembers which way was found good for which shape."""

    def __init__(self, weights: WeightSource, evidence: Evidence) -> None:
        self._weights = weights
        self._evidence = evidence
        self._ways: dict[tuple[int, int, str], _Way] = {}
        self.nbytes = 0

    def examine(self, op: Linear) -> None:
        """Finds the way for the operation's shape, if it is not known."""
        if _key(op) not in self._ways:
            self._ways[_key(op)] = self._find_way(op, torch.from_numpy(self._load(op.weight)))

    def product(self, op: Linear) -> BoundProduct:
        """Raises WeightError where a weight holds values that are not finite."""
        matrix = torch.from_numpy(self._load(op.weight))
        self.nbytes += matrix.nbytes
        way = self._ways.get(_key(op))
        if way is None:
            way = self._ways[_key(op)] = self._find_way(op, matrix)
        bias = None
        if op.bias is not None:
            bias = torch.from_numpy(np.concatenate([self._weights.load(name) for name in op.bias.names]))
        return BoundProduct(way.kind(matrix), way.sizes, op.weight.rows, bias)

    def _load(self, weight: Weight) -> Floats:
        parts = [self._weights.load(name) for name in weight.names]
        return np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def _find_way(self, op: Linear, matrix: Tensor) -> _Way:
        """The first way whose bits do not depend on a row's company."""
        for_logits = op.x.lines == LOGIT_ROWS
        most = _LOGIT_ROWS_AT_ONCE if for_logits else CANDIDATES[-1]
        # Logits never reach a page, so how they are rounded does not decide who may share pages.
        evidence = Evidence() if for_logits else self._evidence
        for kind in (PackedProduct, PlainProduct):
            try:
                sizes = agreeing_sizes(kind(matrix), op.weight.columns, evidence, most=most)
            except (RuntimeError, AttributeError):  # a torch without these operations
                continue
            if sizes is not None:
                return _Way(kind, sizes)
        evidence.add(PlainProduct(matrix)(torch.ones(1, op.weight.columns)))
        return _Way(PlainProduct, (1,))


def _key(op: Linear) -> tuple[int, int, str]:
    return (op.weight.rows, op.weight.columns, op.x.lines)
