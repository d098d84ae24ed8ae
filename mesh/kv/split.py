"""Parts of pages: some layers, or a tensor-parallel half of the heads, sent alone.

Layouts have heads outside of tokens, so a part of a page's heads is one range of bytes
per plane. A part fits where the whole has each of its planes with at least its heads. It
does not know who sends what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mesh.errors import Conflict, InvalidRequest
from mesh.kv.layout import Layout, Plane


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes at `source` of the whole page lie at `target` of the part."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How a page of one layout gives a page of another, of `page_bytes`."""

    page_bytes: int
    pieces: tuple[Piece, ...]

    def take(self, page: memoryview) -> bytearray:
        """The part; bytes between its planes are zero."""
        part = bytearray(self.page_bytes)
        for piece in self.pieces:
            part[piece.target : piece.target + piece.size] = page[piece.source : piece.source + piece.size]
        return part


def cut(whole: Layout, part: Layout) -> Cut:
    """Raises Conflict, naming the plane, where the whole has not all of the part."""
    if whole.page_tokens != part.page_tokens:
        raise Conflict(
            f"pages have {whole.page_tokens} tokens here and {part.page_tokens} there", code="foreign_pages"
        )
    known = {_name(plane): plane for plane in whole.planes}
    windows = {group.group: group.window for group in whole.groups}
    for group in part.groups:
        if windows.get(group.group) != group.window:
            raise Conflict(f"{group} is not a group of pages here", code="foreign_pages")
    return Cut(part.page_bytes, tuple(_piece(known.get(_name(p)), p, part.page_tokens) for p in part.planes))


def heads(layout: Layout, first: int, count: int, of: int) -> Layout:
    """The layout of heads `first` to `first` + `count` of `of` in every plane, packed.

    Planes with fewer heads than `of` cannot be split so: InvalidRequest, naming the plane.
    """
    planes: list[Plane] = []
    end = 0
    for plane in sorted(layout.planes, key=lambda p: p.offset):
        if plane.heads != of or not 0 <= first < first + count <= of:
            raise InvalidRequest(f"{plane} has no heads {first} to {first + count} of {of}", param="layout")
        planes.append(replace(plane, heads=count, offset=end, first_head=plane.first_head + first))
        end += count * plane.head_bytes(layout.page_tokens)
    return Layout(layout.page_tokens, end, tuple(planes), layout.groups)


def layers(layout: Layout, wanted: Sequence[int]) -> Layout:
    """The layout of some layers, packed."""
    planes: list[Plane] = []
    end = 0
    for plane in sorted(layout.planes, key=lambda p: p.offset):
        if plane.layer in wanted:
            planes.append(replace(plane, offset=end))
            end += plane.heads * plane.head_bytes(layout.page_tokens)
    return Layout(layout.page_tokens, end, tuple(planes), layout.groups)


def _name(plane: Plane) -> tuple[object, ...]:
    """What a plane and its part have in common."""
    return plane.group, plane.layer, plane.kind, plane.dim, plane.dtype, plane.turned


def _piece(whole: Plane | None, part: Plane, page_tokens: int) -> Piece:
    if whole is None:
        raise Conflict(f"pages have no {part} here", code="foreign_pages")
    before = part.first_head - whole.first_head
    if before < 0 or before + part.heads > whole.heads:
        raise Conflict(
            f"{part} needs heads {part.first_head} to {part.first_head + part.heads}; pages have"
            f" {whole.first_head} to {whole.first_head + whole.heads} of it here",
            code="foreign_pages",
        )
    size = part.head_bytes(page_tokens)
    return Piece(whole.offset + before * size, part.offset, part.heads * size)
