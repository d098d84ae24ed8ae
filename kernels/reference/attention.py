"""Attention of a ragged batch over pages.

The context is split at multiples of `CHUNK` positions, never by page size or batch. Each chunk gives its
own maximum, sum and weighted values; chunks are merged in a fixed binary tree over their absolute indices,
in which a chunk that is absent or hidden adds an exact zero. So a row's result depends on nothing but its
own query and context.

New rows are cut into tiles of verified sizes; (tile, chunk) pairs of all sequences run as one batch of
products. Knows nothing of models; `plan` is made once per step and serves all layers of one window.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.reference.elementwise import soft_cap
from kernels.reference.rows import pieces

CHUNK = 64
HIDDEN = -1e30
"""Score of what a row may not see: finite, so that a wholly hidden chunk gives no NaN."""
_ITEMS_BUDGET = 1 << 22
"""Scores held at a time."""

Batched = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Range:
    """The new rows of one sequence in the step."""

    row: int
    """First row of the step."""
    start: int
    """Its position in the sequence."""
    count: int
    pages: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pool:
    """How keys (or values) of a layer lie in the pool, in runs of `run` tokens of one head."""

    page_tokens: int
    heads: int
    run: int
    page_stride: int
    """Runs from one page to the next."""

    def runs(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of all runs. [items, pages of a chunk] -> [items, heads, runs of a chunk]"""
        per_page = self.page_tokens // self.run
        inside = np.arange(self.heads)[:, None] * per_page + np.arange(per_page)
        index = pages[:, None, :, None] * self.page_stride + inside[None, :, None, :]
        return index.reshape(len(pages), self.heads, -1)


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values of a layer: runs of numbers, or of codes with the scales of their tokens."""

    numbers: Tensor
    """[runs, run * dim]"""
    scales: Tensor | None = None
    """[runs, run * 2], where the numbers are codes."""
    which: int = 0
    """Of each token's two scales."""
    page_stride: int = 0
    """Runs from one page to the next,"""
    scale_page_stride: int = 0
    """and runs of scales."""

    def take(self, runs: Tensor, dim: int) -> Tensor:
        """Some runs in float32. [len(runs), run * dim]"""
        found = self.numbers.index_select(0, runs)
        if self.scales is None:
            return found if found.dtype == torch.float32 else found.float()
        pages = runs.div(self.page_stride, rounding_mode="floor")
        inside = runs - pages * self.page_stride
        scales = self.scales.index_select(0, pages * self.scale_page_stride + inside)
        tokens = scales.view(len(runs), -1, 2)[:, :, self.which, None]
        return (found.view(len(runs), -1, dim).float() * tokens).view(len(runs), -1)


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles of one size that run as one batch. Items are (tile, chunk) pairs, those at an edge first."""

    tiles: int
    rows: int
    """Rows of a tile."""
    query_rows: Tensor
    """[tiles * rows]: row of the step; padding repeats the tile's first row."""
    kept: Tensor
    """Which of those are no padding,"""
    kept_rows: Tensor
    """and the rows of the step that they are."""
    item_tile: Tensor
    runs: Tensor
    """[items * heads * runs of a chunk]"""
    edges: int
    """The first so many items hold positions that some row may not see."""
    hidden: Tensor
    """[edges, 1, rows, 1, CHUNK]"""
    unwritten: Tensor
    """[edges, 1, CHUNK, 1]: past the end of the sequence, where a page may hold anything, even NaN."""
    width: int
    """Chunks in the merge tree, a power of two."""
    slot: Tensor
    """[items]: place in the tree, tile * width + index."""


@dataclass(frozen=True, slots=True)
class _Tile:
    range: Range
    first: int
    taken: int
    low: int
    high: int
    """Chunks [low, high) are seen by some row."""
    width: int
    origin: int


def plan(ranges: Sequence[Range], pool: Pool, *, window: int, sizes: tuple[int, ...]) -> list[Group]:
    """How to attend for these ranges. `window` 0 is everything before; `sizes` are the verified tile rows."""
    buckets: dict[tuple[int, int], list[_Tile]] = defaultdict(list)
    for span in ranges:
        first = 0
        for taken, size in pieces(span.count, sizes):
            tile = _tile(span, first, taken, window)
            # Tiles of very different contexts apart, so that a short one is not padded to a long one's tree.
            buckets[size, (tile.width.bit_length() - 1) // 2].append(tile)
            first += taken
    groups: list[Group] = []
    for (size, _), tiles in buckets.items():
        scores = CHUNK * size * pool.heads
        batch: list[_Tile] = []
        held = 0
        for tile in tiles:
            cost = (tile.high - tile.low) * scores
            if batch and held + cost > _ITEMS_BUDGET:
                groups.append(_group(batch, size, pool, window))
                batch, held = [], 0
            batch.append(tile)
            held += cost
        groups.append(_group(batch, size, pool, window))
    return groups


def _tile(span: Range, first: int, taken: int, window: int) -> _Tile:
    low = max(0, span.start + first - window + 1) // CHUNK if window else 0
    high = (span.start + first + taken - 1) // CHUNK + 1
    width = 1 << (high - low - 1).bit_length()
    # The tree's lower levels stand at absolute multiples of `width`; above them there are only zeros.
    origin = low // width * width
    if high > origin + width:
        width *= 2
    return _Tile(span, first, taken, low, high, width, origin)


def _group(tiles: list[_Tile], size: int, pool: Pool, window: int) -> Group:
    width = max(tile.width for tile in tiles)
    offsets = np.minimum(np.arange(size)[None, :], np.array([tile.taken - 1 for tile in tiles])[:, None])
    firsts = np.array([tile.first for tile in tiles])[:, None]
    rows = offsets + firsts + np.array([tile.range.row for tile in tiles])[:, None]
    positions = offsets + firsts + np.array([tile.range.start for tile in tiles])[:, None]
    kept = np.arange(size)[None, :] < np.array([tile.taken for tile in tiles])[:, None]

    counts = np.array([tile.high - tile.low for tile in tiles])
    item_tile = np.repeat(np.arange(len(tiles)), counts)
    chunk = np.concatenate([np.arange(tile.low, tile.high) for tile in tiles])
    last_seen_by_all = positions[:, 0][item_tile]
    edge = (chunk + 1) * CHUNK - 1 > last_seen_by_all
    if window:
        edge |= chunk * CHUNK <= positions[:, -1][item_tile] - window
    if width == 1:
        # One item per tile and nothing to merge: the items stay in the order of the tiles.
        edge[:] = True
    order = np.argsort(~edge, kind="stable")
    item_tile, chunk, edges = item_tile[order], chunk[order], int(edge.sum())

    keys = chunk[:edges, None] * CHUNK + np.arange(CHUNK)
    queries = positions[item_tile[:edges]]
    hidden = keys[:, None, :] > queries[:, :, None]
    if window:
        hidden |= keys[:, None, :] <= queries[:, :, None] - window
    ends = np.array([tile.range.start + tile.range.count for tile in tiles])[item_tile[:edges]]
    unwritten = keys >= ends[:, None]

    per_chunk = CHUNK // pool.page_tokens
    pages = np.zeros((len(chunk), per_chunk), np.int64)
    tables = [tile.range.pages for tile in tiles]
    longest = max(len(table) for table in tables)
    # Blocks that do not exist yet read the first page of the sequence: any page will do, they are hidden.
    grid = np.array([np.pad(table, (0, longest - len(table)), constant_values=table[0]) for table in tables])
    blocks = chunk[:, None] * per_chunk + np.arange(per_chunk)
    known = np.array([len(table) for table in tables])[item_tile][:, None] > blocks
    pages = np.where(known, grid[item_tile[:, None], np.minimum(blocks, longest - 1)], grid[item_tile, :1])

    origins = np.array([tile.origin for tile in tiles])[item_tile]
    return Group(
        tiles=len(tiles),
        rows=size,
        query_rows=torch.from_numpy(rows.reshape(-1)),
        kept=torch.from_numpy(np.flatnonzero(kept.reshape(-1))),
        kept_rows=torch.from_numpy(rows[kept]),
        item_tile=torch.from_numpy(item_tile),
        runs=torch.from_numpy(pool.runs(pages).reshape(-1)),
        edges=edges,
        hidden=torch.from_numpy(hidden[:, None, :, None, :]),
        unwritten=torch.from_numpy(unwritten[:, None, :, None]),
        width=width,
        slot=torch.from_numpy(item_tile * width + chunk - origins),
    )


def attend(
    q: Tensor,
    k_runs: Stored,
    v_runs: Stored,
    groups: Sequence[Group],
    *,
    kv_heads: int,
    scale: float,
    cap: float = 0.0,
    bmm: Batched = torch.bmm,
) -> Tensor:
    """[rows, query heads, dim] -> [rows, query heads * dim], over pages."""
    heads, dim = q.shape[1], q.shape[2]
    out = torch.empty(q.shape[0], heads * dim)
    scaled = q * scale
    for group in groups:
        _attend_group(scaled, k_runs, v_runs, group, kv_heads, cap, bmm, out)
    return out


def _attend_group(
    q: Tensor,
    k_runs: Stored,
    v_runs: Stored,
    group: Group,
    kv_heads: int,
    cap: float,
    bmm: Batched,
    out: Tensor,
) -> None:
    tiles, rows, items = group.tiles, group.rows, len(group.item_tile)
    shared, dim = q.shape[1] // kv_heads, q.shape[2]
    lines = rows * shared

    queries = q.index_select(0, group.query_rows).view(tiles, rows, kv_heads, shared, dim).transpose(1, 2)
    queries = queries.index_select(0, group.item_tile).reshape(items * kv_heads, lines, dim)
    k = k_runs.take(group.runs, dim).view(items * kv_heads, CHUNK, dim)
    v = v_runs.take(group.runs, dim).view(items * kv_heads, CHUNK, dim)
    v.view(items, kv_heads, CHUNK, dim)[: group.edges].masked_fill_(group.unwritten, 0.0)

    p = bmm(queries, k.transpose(1, 2))
    if cap:
        p = soft_cap(p, cap)
    p.view(items, kv_heads, rows, shared, CHUNK)[: group.edges].masked_fill_(group.hidden, HIDDEN)
    peak = p.amax(-1, keepdim=True)
    p.sub_(peak).exp_()
    total = p.sum(-1, keepdim=True)
    o = bmm(p, v)
    if group.width > 1:
        o, total = _merge(o, total, peak, group, kv_heads * lines, dim)
    o = o.div_(total).view(tiles, kv_heads, rows, shared, dim).transpose(1, 2)
    flat = o.reshape(tiles * rows, kv_heads * shared * dim)
    out.index_copy_(0, group.kept_rows, flat.index_select(0, group.kept))


def _merge(
    o: Tensor, total: Tensor, peak: Tensor, group: Group, lines: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Chunks into tiles: [items * lines, dim] -> [tiles * lines, dim], and the sums likewise."""
    tiles, width, items = group.tiles, group.width, len(group.item_tile)
    peaks = torch.full((tiles * width, lines), HIDDEN)
    peaks.index_copy_(0, group.slot, peak.view(items, lines))
    grid = peaks.view(tiles, width, lines)
    weights = (grid - grid.amax(1, keepdim=True)).exp_().view(tiles * width, lines)
    weight = weights.index_select(0, group.slot)

    sums = torch.zeros(tiles * width, lines)
    sums.index_copy_(0, group.slot, total.view(items, lines).mul_(weight))
    values = torch.zeros(tiles * width, lines, dim)
    values.index_copy_(0, group.slot, o.view(items, lines, dim).mul_(weight[:, :, None]))
    return (
        _tree(values.view(tiles, width, lines, dim)).reshape(-1, dim),
        _tree(sums.view(tiles, width, lines)).reshape(-1, 1),
    )


def _tree(x: Tensor) -> Tensor:
    """Sum along dimension 1, whose size is a power of two, in pairs of neighbours."""
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]
