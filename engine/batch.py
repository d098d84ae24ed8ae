"""What one step computes on: rows of all slices in a line, their positions and pages, and who needs logits.

Made once per step and shared by all layers. Knows nothing of weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.executor import Slice
from engine.pool import PagePool
from kernels.reference.attention import Group, Range, plan


@dataclass(slots=True)
class StepPlan:
    pool: PagePool
    tokens: list[int]
    positions: Tensor
    write_pages: Tensor
    write_slots: Tensor
    picked: Tensor
    """Rows that need logits."""
    ranges: list[Range]
    sizes: Callable[[int, int], tuple[int, ...]]
    _groups: dict[tuple[int, int, int, int], list[Group]] = field(default_factory=dict)
    _turns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def logit_rows(self) -> int:
        return len(self.picked)

    def groups(self, kv_heads: int, dim: int, shared: int, window: int) -> list[Group]:
        """How to attend in layers of this shape."""
        key = (kv_heads, dim, shared, window)
        if key not in self._groups:
            pool = self.pool.shape(kv_heads, dim)
            self._groups[key] = plan(self.ranges, pool, window=window, sizes=self.sizes(shared, dim))
        return self._groups[key]

    def turns(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows' positions. [rows, 1, pairs]"""
        key = id(table[0])
        if key not in self._turns:
            cos, sin = (part.index_select(0, self.positions).unsqueeze(1) for part in table)
            self._turns[key] = (cos, sin)
        return self._turns[key]


def plan_step(
    batch: Sequence[Slice], pool: PagePool, sizes: Callable[[int, int], tuple[int, ...]]
) -> StepPlan:
    """Lays the slices out one after another. They were checked before."""
    tokens: list[int] = []
    positions: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    pages: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    picked: list[int] = []
    ranges: list[Range] = []
    for slice_ in batch:
        count, row = len(slice_.tokens), len(tokens)
        tokens.extend(slice_.tokens)
        where = np.arange(slice_.start, slice_.start + count)
        table = np.asarray(slice_.pages, dtype=np.int64)[: -(-(slice_.start + count) // pool.page_tokens)]
        positions.append(where)
        pages.append(table[where // pool.page_tokens])
        picked.extend(range(row + count - slice_.logits, row + count))
        ranges.append(Range(row, slice_.start, count, table))
    flat = np.concatenate(positions)
    return StepPlan(
        pool=pool,
        tokens=tokens,
        positions=torch.from_numpy(flat),
        write_pages=torch.from_numpy(np.concatenate(pages)),
        write_slots=torch.from_numpy(flat % pool.page_tokens),
        picked=torch.tensor(picked, dtype=torch.int64),
        ranges=ranges,
        sizes=sizes,
    )
