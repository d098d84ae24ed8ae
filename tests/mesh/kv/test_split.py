"""Parts of pages against numpy's own slicing, and what does not fit refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import Conflict, InvalidRequest
from mesh.kv.layout import CacheGroup, Dtype, Layout, Plane, PlaneKind, layout_from_proto, layout_to_proto
from mesh.kv.split import cut, heads, layers

P = 16


def layout(n_heads: int, n_layers: int, dim: int, *, gap: int = 0, turned: bool = False) -> Layout:
    """Two halves of f16 and a plane of f32 scales per layer, with `gap` bytes between planes."""
    planes: list[Plane] = []
    end = 0
    for layer in range(n_layers):
        for kind, d, dtype in (
            (PlaneKind.SCALE, 2, Dtype.F32),
            (PlaneKind.K, dim, Dtype.F16),
            (PlaneKind.V, dim, Dtype.F16),
        ):
            plane = Plane(0, layer, kind, n_heads, d, dtype, end, turned and kind is PlaneKind.K)
            planes.append(plane)
            end += n_heads * plane.head_bytes(P) + gap
    return Layout(P, end, tuple(planes))


def values(page: bytes | bytearray, plane: Plane) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """[heads, bytes of a head]"""
    size = plane.head_bytes(P)
    data = np.frombuffer(page, np.uint8, plane.heads * size, plane.offset)
    return data.reshape(plane.heads, size)


@given(
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([4, 20, 64]),
    st.data(),
    st.sampled_from([0, 8]),
    st.booleans(),
)
def test_a_part_has_the_bytes_of_its_heads(
    n_heads: int, n_layers: int, dim: int, data: st.DataObject, gap: int, turned: bool
) -> None:
    whole = layout(n_heads, n_layers, dim, gap=gap, turned=turned)
    first = data.draw(st.integers(0, n_heads - 1))
    count = data.draw(st.integers(1, n_heads - first))
    wanted = data.draw(st.lists(st.integers(0, n_layers - 1), min_size=1, unique=True))
    part = layers(heads(whole, first, count, n_heads), wanted)
    part.check()
    page = np.random.default_rng(1).integers(0, 256, whole.page_bytes, dtype=np.uint8).tobytes()
    got = cut(whole, part).take(memoryview(page))
    assert len(got) == part.page_bytes
    by_name = {(p.layer, p.kind): p for p in whole.planes}
    for plane in part.planes:
        expected = values(page, by_name[plane.layer, plane.kind])[first : first + count]
        assert (values(got, plane) == expected).all()


def test_the_parts_of_all_ranks_are_the_page() -> None:
    whole = layout(6, 2, 8)
    page = np.random.default_rng(2).integers(0, 256, whole.page_bytes, dtype=np.uint8).tobytes()
    parts = [heads(whole, first, 2, 6) for first in (0, 2, 4)]
    assert len({part.digest() for part in parts}) == 3, "ranks never share an arena"
    for plane in whole.planes:
        got = [
            values(
                cut(whole, part).take(memoryview(page)),
                next(p for p in part.planes if (p.layer, p.kind) == (plane.layer, plane.kind)),
            )
            for part in parts
        ]
        assert (np.concatenate(got) == values(page, plane)).all()


def test_a_part_of_a_part() -> None:
    whole = layout(8, 1, 4)
    page = np.random.default_rng(3).integers(0, 256, whole.page_bytes, dtype=np.uint8).tobytes()
    half = heads(whole, 4, 4, 8)
    quarter = heads(half, 2, 2, 4)
    assert {p.first_head for p in quarter.planes} == {6}
    of_half = cut(half, quarter).take(memoryview(cut(whole, half).take(memoryview(page))))
    assert of_half == cut(whole, quarter).take(memoryview(page))


def test_the_whole_is_a_part_and_crosses_the_wire() -> None:
    whole = layout(2, 2, 4)
    page = bytes(range(256)) * (whole.page_bytes // 256 + 1)
    assert cut(whole, whole).take(memoryview(page)[: whole.page_bytes]) == page[: whole.page_bytes]
    half = heads(whole, 1, 1, 2)
    assert layout_from_proto(layout_to_proto(half)) == half


def test_what_does_not_fit_is_refused_by_name() -> None:
    whole = layout(4, 2, 8)
    half = heads(whole, 2, 2, 4)
    changed = {
        "layer=7": replace(half.planes[1], layer=7),
        "dim=9": replace(half.planes[1], dim=9),
        "BF16": replace(half.planes[1], dtype=Dtype.BF16),
        "turned=True": replace(half.planes[1], turned=True),
        "heads 3 to 5": replace(half.planes[1], first_head=3),
    }
    for name, plane in changed.items():
        with pytest.raises(Conflict, match=name) as refused:
            cut(whole, replace(half, planes=(half.planes[0], plane, *half.planes[2:])))
        assert refused.value.code == "foreign_pages"
    with pytest.raises(Conflict, match="heads 0 to 4"):
        cut(half, whole)
    with pytest.raises(Conflict, match="16 tokens"):
        cut(whole, replace(half, page_tokens=32))
    with pytest.raises(Conflict, match="window=512"):
        cut(whole, replace(half, groups=(CacheGroup(0, 512),)))
    with pytest.raises(InvalidRequest, match="heads 3 to 5 of 4"):
        heads(whole, 3, 2, 4)
