"""Attention over pages beside a numpy twin: shapes, windows, page sizes; equal bits whatever the company."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import load
from tests.kernels.cpu_programs import ISAS, Floats, add_floats, normal, numbers

TOKENS = 700
ITEM = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    shared: int
    dim: int
    window: int = 0
    cap: float = 0.0

    @property
    def widths(self) -> tuple[int, int]:
        """Of the queries, and of keys or values."""
        return self.heads * self.shared * self.dim, self.heads * self.dim


class Attending:
    """A table of rows q|k|v; each step writes k and v of its rows and attends with q."""

    def __init__(
        self,
        table: Floats,
        shape: Shape,
        *,
        isa: str = "",
        threads: int = 1,
        page_tokens: int = 16,
        dtype: str = "f32",
    ) -> None:
        q_width, k_width = shape.widths
        self.shape, self.page_tokens = shape, page_tokens
        engine = self.engine = load().Engine(threads, isa)
        x = engine.buffer(q_width + 2 * k_width, False, False)
        out, picked = engine.buffer(q_width, False, False), engine.buffer(q_width, True, False)
        plane = shape.heads * page_tokens * shape.dim * ITEM[dtype]
        scales = shape.heads * page_tokens * 8 if dtype == "int8" else 0
        engine.embed(add_floats(engine, table), 1.0, (x, 0, table.shape[1]))
        engine.write_kv(
            (x, q_width, k_width),
            (x, q_width + k_width, k_width),
            shape.heads,
            shape.dim,
            0,
            plane,
            2 * plane,
        )
        engine.attend(
            (x, 0, q_width),
            shape.heads,
            shape.shared,
            shape.dim,
            0.3,
            shape.window,
            shape.cap,
            0,
            plane,
            2 * plane,
            (out, 0, q_width),
        )
        engine.pick((out, 0, q_width), (picked, 0, q_width))
        identity = add_floats(engine, np.eye(q_width, dtype=np.float32))
        engine.product((picked, 0, q_width), identity, -1, "store", (-1, 0, q_width), True)
        engine.plan(96, TOKENS)
        self.pages = -(-TOKENS // page_tokens) + 3
        # Bits that are no numbers wherever nobody wrote.
        self.arena = np.full(self.pages * (2 * plane + scales + 8), 255, np.uint8)
        engine.bind(self.arena, self.pages, 2 * plane + scales + 8, page_tokens, dtype)

    def run(self, parts: Sequence[int]) -> Floats:
        """All rows, in steps of these sizes, over pages in a scattered order."""
        found, start = [], 0
        table = np.random.default_rng(9).permutation(self.pages).astype(np.int32)
        for count in parts:
            out = np.empty((count, self.shape.widths[0]), np.float32)
            self.engine.step(
                np.arange(start, start + count, dtype=np.int32),
                numbers(start),
                numbers(count),
                numbers(count),
                numbers(0, len(table)),
                table,
                out,
            )
            found.append(out)
            start += count
        return np.concatenate(found)


def table_of(shape: Shape, rows: int) -> Floats:
    q_width, k_width = shape.widths
    return normal(shape.dim, rows, q_width + 2 * k_width)


def twin(table: Floats, shape: Shape) -> NDArray[np.float64]:
    rows, (q_width, k_width) = len(table), shape.widths
    x = table.astype(np.float64)
    q = x[:, :q_width].reshape(rows, shape.heads, shape.shared, shape.dim)
    k = x[:, q_width : q_width + k_width].reshape(rows, shape.heads, shape.dim)
    v = x[:, q_width + k_width :].reshape(rows, shape.heads, shape.dim)
    scores = np.einsum("ihsd,jhd->hsij", q, k) * 0.3
    if shape.cap:
        scores = shape.cap * np.tanh(scores / shape.cap)
    distance = np.arange(rows)[:, None] - np.arange(rows)[None, :]
    hidden = distance < 0
    if shape.window:
        hidden |= distance >= shape.window
    scores[:, :, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum("hsij,jhd->ihsd", weights, v).reshape(rows, q_width)
    return out


SHAPES = [
    Shape(3, 3, 64),
    Shape(1, 1, 8),
    Shape(2, 4, 20),
    Shape(1, 5, 80, window=100),
    Shape(2, 1, 16, window=1),
    Shape(2, 3, 32, window=70, cap=1.5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_twin_over_instruction_sets(shape: Shape) -> None:
    rows = 150
    table = table_of(shape, rows)
    found = {isa: Attending(table, shape, isa=isa).run([rows]) for isa in ISAS}
    for result in found.values():
        np.testing.assert_allclose(result, twin(table, shape), rtol=0, atol=2e-5)
    assert len({result.tobytes() for result in found.values()}) == 1


@pytest.mark.parametrize("shape", [Shape(2, 3, 16), Shape(2, 2, 24, window=130)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8"])
def test_company_page_size_and_threads_change_no_bit(shape: Shape, dtype: str) -> None:
    table = table_of(shape, TOKENS)
    whole = Attending(table, shape, dtype=dtype).run([TOKENS])
    assert np.isfinite(whole).all()
    for page_tokens, threads, parts in (
        (16, 1, [1, 63, 64, 65, 7, 500]),
        (1, 2, [100, 600]),
        (64, 2, [690] + [1] * 10),
        (8, 3, [512, 1, 187]),
        (32, 1, [33, 667]),
    ):
        other = Attending(table, shape, dtype=dtype, page_tokens=page_tokens, threads=threads)
        assert other.run(parts).tobytes() == whole.tobytes(), (page_tokens, threads, parts)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 5e-3), ("bf16", 5e-2), ("int8", 5e-2)])
@pytest.mark.parametrize("dim", [16, 20])
def test_smaller_numbers_are_near_floats(dtype: str, tolerance: float, dim: int) -> None:
    shape = Shape(2, 3, dim)
    table = table_of(shape, 200)
    found = {isa: Attending(table, shape, dtype=dtype, isa=isa).run([200]) for isa in ISAS}
    for result in found.values():
        np.testing.assert_allclose(result, twin(table, shape), rtol=0, atol=tolerance)
    assert len({result.tobytes() for result in found.values()}) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_in_8_bits_a_key_that_is_not_finite_shows_from_its_row_on(isa: str, broken: float) -> None:
    shape = Shape(2, 1, 16)
    table = table_of(shape, 100)
    table[70, shape.widths[0] + 3] = broken
    found = Attending(table, shape, dtype="int8", isa=isa).run([100])
    assert np.isfinite(found[:70]).all()
    assert not np.isfinite(found[70:, :16]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_a_page_holds_keys_turned_and_values_as_they_are(isa: str) -> None:
    shape, tokens, page_tokens = Shape(2, 1, 20), 45, 16
    table = table_of(shape, tokens)
    attending = Attending(table, shape, isa=isa, page_tokens=page_tokens)
    attending.run([40, 5])
    order = np.random.default_rng(9).permutation(attending.pages)
    heads, dim = shape.heads, shape.dim
    plane = heads * dim * page_tokens
    pages = attending.arena.view(np.float32).reshape(attending.pages, -1)
    for position in range(tokens):
        page, slot = pages[order[position // page_tokens]], position % page_tokens
        k = page[:plane].reshape(heads, dim, page_tokens)[:, :, slot]
        v = page[plane : 2 * plane].reshape(heads, page_tokens, dim)[:, slot]
        np.testing.assert_array_equal(np.concatenate([k.ravel(), v.ravel()]), table[position, heads * dim :])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    shape = Shape(1, 2, 8)
    table = table_of(shape, 130) * 40
    np.testing.assert_allclose(Attending(table, shape).run([130]), twin(table, shape), rtol=0, atol=2e-2)


class TestRefusals:
    """What comes from outside is checked before a page is touched."""

    @pytest.fixture
    def attending(self) -> Attending:
        shape = Shape(1, 1, 8)
        return Attending(table_of(shape, TOKENS), shape)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokens": numbers(-1)}, "vocabulary"),
            ({"tokens": numbers(TOKENS)}, "vocabulary"),
            ({"tokens": numbers(0, 1)}, "differ in number"),
            ({"starts": numbers(-1)}, "context"),
            ({"starts": numbers(TOKENS)}, "context"),
            ({"starts": numbers(2**31 - 1)}, "context"),
            ({"counts": numbers(0)}, "context"),
            ({"counts": numbers(2**31 - 1)}, "context"),
            ({"logits": numbers(2)}, "logits"),
            ({"logits": numbers(-1)}, "logits"),
            ({"pages": numbers(-1)}, "outside the pool"),
            ({"pages": numbers(10_000)}, "outside the pool"),
            ({"page_starts": numbers(0, 0)}, "fewer pages"),
            ({"page_starts": numbers(0, 2)}, "memory"),
            ({"page_starts": numbers(-5, 1)}, "memory"),
            ({"page_starts": numbers(1, 1)}, "fewer pages"),
            ({"out": np.empty((2, 8), np.float32)}, "rows"),
            ({"out": np.empty((1, 7), np.float32)}, "width"),
            ({"counts": numbers(1, 1)}, "differ in length"),
        ],
    )
    def test_hostile_batches(self, attending: Attending, change: dict[str, object], message: str) -> None:
        batch: dict[str, object] = {
            "tokens": numbers(0),
            "starts": numbers(0),
            "counts": numbers(1),
            "logits": numbers(1),
            "page_starts": numbers(0, 1),
            "pages": numbers(0),
            "out": np.empty((1, 8), np.float32),
        }
        before = attending.arena.tobytes()
        with pytest.raises(ValueError, match=message):
            attending.engine.step(**(batch | change))  # type: ignore[arg-type]
        assert attending.arena.tobytes() == before
        attending.engine.step(**batch)  # type: ignore[arg-type]

    def test_pages_that_do_not_fit(self, attending: Attending) -> None:
        for arguments in ((100, 1032), (0, 1032), (1, 512), (-1, 1032), (1, 0)):
            with pytest.raises(ValueError, match=r"fit|plane"):
                attending.engine.bind(np.zeros(2000, np.uint8), *arguments, 16, "f32")
