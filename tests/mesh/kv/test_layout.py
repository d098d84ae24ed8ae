"""Layouts: what they describe, how they cross the wire, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.kv.header_file import HEAD_BYTES, RECORD, headers_bytes, pack_header, read_header
from mesh.kv.layout import CacheGroup, Dtype, Layout, Plane, PlaneKind, layout_from_proto, layout_to_proto
from tests.kvstore.node import LAYOUT


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    offset, planes = 0, []
    tokens = draw(st.sampled_from([1, 16, 32]))
    for layer in range(draw(st.integers(1, 4))):
        for kind in draw(st.lists(st.sampled_from(list(PlaneKind)), min_size=1, max_size=3, unique=True)):
            plane = Plane(
                draw(st.integers(0, 1)),
                layer,
                kind,
                draw(st.integers(1, 4)),
                draw(st.integers(1, 64)),
                draw(st.sampled_from(list(Dtype))),
                offset,
                draw(st.booleans()),
            )
            planes.append(plane)
            offset += plane.heads * plane.dim * tokens * plane.dtype.itemsize + draw(st.integers(0, 8))
    return Layout(tokens, offset, tuple(planes), (CacheGroup(0), CacheGroup(1, 512)))


@settings(max_examples=50)
@given(layouts())
def test_a_layout_crosses_the_wire_unchanged(layout: Layout) -> None:
    back = layout_from_proto(layout_to_proto(layout))
    assert back == layout
    assert back.digest() == layout.digest()


@settings(max_examples=30)
@given(layouts(), st.data())
def test_layouts_that_differ_have_other_digests(layout: Layout, data: st.DataObject) -> None:
    other = data.draw(layouts())
    assert (other == layout) == (other.digest() == layout.digest())
    assert replace(layout, page_bytes=layout.page_bytes + 1).digest() != layout.digest()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (replace(LAYOUT, planes=()), "needs"),
        (replace(LAYOUT, page_tokens=0), "needs"),
        (replace(LAYOUT, page_bytes=2047), "end at byte 2048 of a page of 2047"),
        (replace(LAYOUT, planes=(LAYOUT.planes[0], replace(LAYOUT.planes[1], offset=1023))), "overlaps"),
        (replace(LAYOUT, planes=(replace(LAYOUT.planes[0], group=3),)), "group"),
    ],
)
def test_impossible_layouts_are_refused_by_name(layout: Layout, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        layout_from_proto(layout_to_proto(layout))


@given(
    st.integers(0, 4),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(8, RECORD.size - 1),
)
def test_a_header_reads_as_written_and_a_torn_one_is_known(
    state: int, generation: int, checksum: int, block_id: bytes, flip: int
) -> None:
    file = bytearray(headers_bytes(3))
    file[HEAD_BYTES + RECORD.size : HEAD_BYTES + 2 * RECORD.size] = pack_header(
        state, generation, 7, checksum, block_id, b"parent" + bytes(10)
    )
    header = read_header(file, 1)
    assert (header.state, header.generation, header.owner, header.checksum) == (
        state,
        generation,
        7,
        checksum,
    )
    assert header.block_id == (block_id if any(block_id) else b"")
    assert not header.torn
    file[HEAD_BYTES + RECORD.size + flip] ^= 0x10
    assert read_header(file, 1).torn
