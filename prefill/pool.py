"""Between the engine's words for pages and the store's: layout and fingerprint."""

from __future__ import annotations

from engine import EngineInfo, PageGeometry
from mesh.blocks import content_fingerprint
from mesh.kv.layout import CacheGroup, Dtype, Layout, Plane, PlaneKind


def layout_of(geometry: PageGeometry) -> Layout:
    """The same planes, as the store compares them."""
    return Layout(
        page_tokens=geometry.page_tokens,
        page_bytes=geometry.page_bytes,
        planes=tuple(
            Plane(
                group=p.group,
                layer=p.layer,
                kind=PlaneKind[p.kind.upper()],
                heads=p.heads,
                dim=p.dim,
                dtype=Dtype[p.dtype.upper()],
                offset=p.offset,
                turned=p.turned,
            )
            for p in geometry.planes
        ),
        groups=tuple(CacheGroup(g.group, g.window) for g in geometry.groups),
    )


def fingerprint_of(info: EngineInfo) -> bytes:
    """Names everything that decides the bits of a page apart from the tokens. 16 bytes."""
    return content_fingerprint(
        info.weights_digest, info.kv_dtype, info.layout.page_tokens, info.rope, info.numerics_id
    )
