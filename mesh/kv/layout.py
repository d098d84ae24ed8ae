"""The layout of a page: a list of planes, not a formula.

Two parties that share pages compare layouts whole; `digest` names one in file
names and logs. This module does not know what the numbers in a plane mean.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvmesh.v1 import common_pb2

from mesh.errors import InvalidRequest


class Dtype(IntEnum):
    """The number format of a plane."""

    F32 = 1
    F16 = 2
    BF16 = 3
    I8 = 4

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return {Dtype.F32: 4, Dtype.F16: 2, Dtype.BF16: 2, Dtype.I8: 1}[self]


class PlaneKind(IntEnum):
    """What a plane holds."""

    K = 1
    V = 2
    SCALE = 3
    STATE = 4


@dataclass(frozen=True, slots=True)
class Plane:
    """One contiguous part of a page: [heads, page_tokens, dim] of `dtype`, `offset` bytes in; `turned`:
    [heads, dim, page_tokens]. `first_head`: which of the model's heads its first one is, where a
    tensor-parallel split has several parts."""

    group: int
    layer: int
    kind: PlaneKind
    heads: int
    dim: int
    dtype: Dtype
    offset: int
    turned: bool = False
    first_head: int = 0

    def head_bytes(self, page_tokens: int) -> int:
        """What one head of a page takes; heads lie one after another."""
        return page_tokens * self.dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a page table. `window` in tokens; 0 is full attention."""

    group: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole layout of a page. Comparable; equal layouts may share an arena."""

    page_tokens: int
    page_bytes: int
    planes: tuple[Plane, ...]
    groups: tuple[CacheGroup, ...] = (CacheGroup(0),)

    def check(self) -> None:
        """Raises InvalidRequest, naming the plane, where planes overlap or leave the page."""
        if self.page_tokens < 1 or self.page_bytes < 1 or not self.planes:
            raise InvalidRequest("a page layout needs page_tokens, page_bytes and planes", param="layout")
        known = {g.group for g in self.groups}
        end = 0
        for plane in sorted(self.planes, key=lambda p: p.offset):
            if plane.group not in known:
                raise InvalidRequest(f"{plane} is of a group that the layout lacks", param="layout")
            if plane.offset < end:
                raise InvalidRequest(f"{plane} overlaps the plane before it", param="layout")
            end = plane.offset + plane.heads * plane.head_bytes(self.page_tokens)
        if end > self.page_bytes:
            raise InvalidRequest(f"planes end at byte {end} of a page of {self.page_bytes}", param="layout")

    def digest(self) -> bytes:
        """16 bytes that differ for layouts that differ."""
        return hashlib.blake2b(
            layout_to_proto(self).SerializeToString(deterministic=True),
            digest_size=16,
            person=b"kvmesh.layout",
        ).digest()

    def __str__(self) -> str:
        return (
            f"{self.page_tokens} tokens, {self.page_bytes} bytes, {len(self.planes)} planes, "
            f"digest {self.digest().hex()[:12]}"
        )


def _wire(value: IntEnum) -> Any:
    """An enum as protobuf takes it: the numbers of both sides are the same."""
    return int(value)


def layout_to_proto(layout: Layout) -> common_pb2.PageLayout:
    """The layout as it crosses the wire."""
    return common_pb2.PageLayout(
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        groups=[common_pb2.CacheGroup(group=g.group, window=g.window) for g in layout.groups],
        planes=[
            common_pb2.Plane(
                group=p.group,
                layer=p.layer,
                kind=_wire(p.kind),
                heads=p.heads,
                dim=p.dim,
                dtype=_wire(p.dtype),
                offset=p.offset,
                turned=p.turned,
                first_head=p.first_head,
            )
            for p in layout.planes
        ],
    )


def layout_from_proto(message: common_pb2.PageLayout) -> Layout:
    """The layout that a message describes; InvalidRequest where it makes no sense."""
    try:
        planes = tuple(
            Plane(
                p.group,
                p.layer,
                PlaneKind(p.kind),
                p.heads,
                p.dim,
                Dtype(p.dtype),
                p.offset,
                p.turned,
                p.first_head,
            )
            for p in message.planes
        )
    except ValueError as error:
        raise InvalidRequest(f"unknown page layout: {error}", param="layout") from error
    layout = Layout(
        page_tokens=message.page_tokens,
        page_bytes=message.page_bytes,
        planes=planes,
        groups=tuple(CacheGroup(g.group, g.window) for g in message.groups),
    )
    layout.check()
    return layout
