"""The geometry of a page: which numbers lie where.

A page holds `page_tokens` consecutive tokens of one sequence for every layer. Its layout is a list of
planes and not a formula: layers outermost, keys before values, heads before tokens. The fields are those
of `kvmesh.v1.PageLayout`; the workers convert. Knows nothing of who owns a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineError

KV_DTYPES = ("f32", "f16", "bf16", "int8")
"""int8: codes, and a scale per token and head in a plane of their own."""
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
CHUNK_TOKENS = 64
"""Attention splits the context at multiples of this; a page divides it, so that no page straddles a split."""


@dataclass(frozen=True, slots=True)
class Plane:
    """`heads` x `tokens` x `dim` numbers of `dtype`, `offset` bytes into the page; `heads` x `dim` x `tokens`
    where it is `turned`."""

    group: int
    layer: int
    kind: str
    """"k", "v", or "scale": of each token and head the scales of key and value, where those are i8."""
    heads: int
    dim: int
    dtype: str
    offset: int
    turned: bool = False


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers that share one page table; `window` 0 is full attention."""

    group: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class PageGeometry:
    page_tokens: int
    page_bytes: int
    groups: tuple[CacheGroup, ...]
    planes: tuple[Plane, ...]

    def plane(self, layer: int, kind: str) -> Plane:
        for plane in self.planes:
            if plane.layer == layer and plane.kind == kind:
                return plane
        raise EngineError(f"the page layout has no {kind} plane for layer {layer}")

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps per token: keys and values of `heads` x `dim`."""

    layer: int
    heads: int
    dim: int


def check_page_tokens(page_tokens: int) -> None:
    if page_tokens < 1 or CHUNK_TOKENS % page_tokens:
        raise EngineError(f"page_tokens is {page_tokens}: it must be 1, 2, 4, 8, 16, 32 or 64")


def page_geometry(
    caches: Sequence[LayerCache],
    *,
    page_tokens: int,
    dtype: str,
    kinds: Sequence[str] = ("k", "v"),
    turned: bool = False,
) -> PageGeometry:
    """Lays the planes of all layers out one after another in a single full-attention group. `turned`: those
    of keys, so that the numbers of neighbouring tokens stand side by side."""
    check_page_tokens(page_tokens)
    if dtype not in KV_DTYPES:
        raise EngineError(f"kv_dtype is {dtype!r}: it must be {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}")
    item = "i8" if dtype == "int8" else dtype
    planes: list[Plane] = []
    offset = 0

    def add(cache: LayerCache, kind: str, dim: int, item: str) -> None:
        nonlocal offset
        planes.append(
            Plane(0, cache.layer, kind, cache.heads, dim, item, offset, turned=turned and kind == "k")
        )
        offset += cache.heads * page_tokens * dim * ITEM_BYTES[item]

    if item == "i8":  # first, so that each scale lies at a multiple of its size
        for cache in caches:
            add(cache, "scale", len(kinds), "f32")
    for cache in caches:
        for kind in kinds:
            add(cache, kind, cache.dim, item)
    unit = max(ITEM_BYTES[plane.dtype] for plane in planes)
    return PageGeometry(page_tokens, -(-offset // unit) * unit, (CacheGroup(0),), tuple(planes))
