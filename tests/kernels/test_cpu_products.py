"""Products of the CPU core beside their numpy twin: shapes, forms, and equal bits whatever the company."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import load
from tests.kernels.cpu_programs import (
    ISAS,
    Coded,
    Floats,
    Rows,
    add_floats,
    add_halves,
    normal,
    product,
    to_halves,
)

FORMS = [
    ("u4", True, True, 32),
    ("u4", False, True, 32),
    ("u4", False, False, 32),
    ("u4", False, True, 16),
    ("u4", False, False, 16),
    ("i8", True, False, 32),
    ("i8", False, True, 32),
    ("i8", False, True, 16),
    ("i8", False, False, 16),
]
SHAPES = [(16, 32, 1), (1, 64, 4), (40, 576, 9), (17, 1536, 6), (96, 32, 70)]


def quantised_twin(x: Floats) -> tuple[NDArray[np.float64], Floats]:
    """8-bit codes per group of 16, symmetric, to the nearest; and their scales, multiples of the row's step."""
    groups = x.reshape(len(x), -1, 16)
    largest = np.abs(groups).max((1, 2))
    step, steps = largest / np.float32(127 * 4095), np.float32(4095) / largest
    peaks = np.abs(groups).max(2) * steps[:, None]
    multiples = np.maximum(np.floor(peaks + np.float32(0.998)), 1).astype(np.float32)
    inverse = (np.float32(1) / step)[:, None] / multiples
    codes = np.rint(groups * inverse[:, :, None]).astype(np.float64)
    return codes, (multiples * step[:, None])[:, :, None]


@pytest.mark.parametrize(("form", "half", "minima", "group"), FORMS)
@pytest.mark.parametrize(("outputs", "columns", "rows"), SHAPES)
def test_codes(
    form: str, half: bool, minima: bool, group: int, outputs: int, columns: int, rows: int
) -> None:
    weight = Coded.random(form, outputs, columns, half=half, minima=minima, group=group)
    x = normal(1, rows, columns)
    codes, scales = quantised_twin(x)
    wanted = (codes * scales).reshape(rows, columns) @ weight.values.T
    found = {isa: product(x, weight, isa=isa) for isa in ISAS}
    for result in found.values():
        size = np.abs((codes * scales).reshape(rows, columns)) @ np.abs(weight.values.T)
        assert (np.abs(result - wanted) <= 2e-6 * size + 1e-6).all()
    assert len({result.tobytes() for result in found.values()}) == 1


@pytest.mark.parametrize(("outputs", "columns", "rows"), [(1, 1, 1), (5, 7, 3), (33, 100, 6), (272, 32, 70)])
@pytest.mark.parametrize("form", ["f32", "f16", "bf16"])
def test_floats_and_halves(form: str, outputs: int, columns: int, rows: int) -> None:
    x, weight = normal(1, rows, columns), normal(2, outputs, columns)
    found = {isa: product(x, weight, isa=isa, form=form) for isa in ISAS}
    if form != "f32":
        weight = to_halves(weight, form)[1]
        # The sums are those of the same numbers as floats, bit for bit.
        found["f32"] = product(x, weight, isa="portable")
    for result in found.values():
        np.testing.assert_allclose(result, x.astype(np.float64) @ weight.T, rtol=0, atol=1e-4)
    assert len({result.tobytes() for result in found.values()}) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("form", "group"), [("u4", 32), ("u4", 16), ("i8", 32), ("i8", 16), ("f32", 0), ("f16", 0), ("bf16", 0)]
)
def test_a_row_does_not_depend_on_its_company(isa: str, form: str, group: int) -> None:
    weight: Coded | Floats = normal(3, 50, 96)
    if group:
        weight = Coded.random(form, 50, 96, half=group == 32, minima=True, group=group)
    x = normal(4, 75, 96)
    of = "f32" if group else form
    whole = product(x, weight, isa=isa, form=of, rows_at_once=75)
    for rows_at_once, threads in ((1, 1), (3, 1), (7, 2), (75, 2)):
        assert (
            product(x, weight, isa=isa, form=of, threads=threads, rows_at_once=rows_at_once).tobytes()
            == whole.tobytes()
        )
    for row in (0, 3, 74):
        alone = product(x[row : row + 1].copy(), weight, isa=isa, form=of)
        assert alone.tobytes() == whole[row : row + 1].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_codes_do_not_overflow(isa: str) -> None:
    """4-bit sums are held in 16 bits, 8-bit pairs too."""
    x = np.ones((5, 64), np.float32)
    x[1::2] = -1
    for form, code in (("u4", 15), ("i8", 127), ("i8", 128), ("i8", 129)):
        codes = np.full((16, 64), code, np.uint8)
        weight = Coded(form, True, codes, np.ones((16, 2), np.float32), None)
        signed = code if form == "u4" else int(codes.view(np.int8)[0, 0])
        np.testing.assert_allclose(
            product(x, weight, isa=isa), x[:, :1] * np.full(16, 64 * signed), rtol=1e-6
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows_it_and_harms_no_other(isa: str, broken: float) -> None:
    weight = Coded.random("u4", 16, 64, half=True, minima=True)
    x = normal(5, 6, 64)
    wanted = product(x, weight, isa=isa)
    x[2, 40] = broken
    found = product(x, weight, isa=isa)
    assert not np.isfinite(found[2]).any()
    others = [0, 1, 3, 4, 5]
    assert found[others].tobytes() == wanted[others].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_zeros_and_of_tiny_numbers(isa: str) -> None:
    weight = Coded.random("u4", 16, 32, half=True, minima=True)
    x = np.zeros((2, 32), np.float32)
    x[1] = 1e-40
    assert (product(x, weight, isa=isa) == 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_gate_bias_and_addition_at_the_end_of_a_product(isa: str) -> None:
    x, gate, up, bias = normal(1, 5, 64), normal(2, 24, 64), normal(3, 24, 64), normal(4, 64)
    paired = np.stack([gate.reshape(3, 8, 64), up.reshape(3, 8, 64)], axis=1).reshape(48, 64)
    back = normal(5, 64, 24)
    rows = Rows(x, isa=isa)
    engine, view = rows.engine, rows.picked()
    gated = (engine.buffer(24, True, False), 0, 24)
    engine.product(view, add_floats(engine, paired.copy()), -1, "silu_gate", gated, True)
    engine.product(gated, add_floats(engine, back), engine.vector(bias), "add", view, True)
    engine.product(view, add_floats(engine, np.eye(64, dtype=np.float32)), -1, "store", (-1, 0, 64), True)
    g = x.astype(np.float64) @ gate.T
    wanted = x + (g / (1 + np.exp(-g)) * (x.astype(np.float64) @ up.T)) @ back.T + bias
    np.testing.assert_allclose(rows.run(64), wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("form", "half", "minima", "group"), [*FORMS, ("f16", False, False, 0), ("bf16", False, False, 0)]
)
def test_packed_rows_can_be_read_back(form: str, half: bool, minima: bool, group: int) -> None:
    if group:
        weight = Coded.random(form, 37, 96, half=half, minima=minima, group=group)
        wanted = weight.values
    else:
        bits, values = to_halves(normal(1, 37, 96), form)
        wanted = values.astype(np.float64)
    for isa in ISAS:
        engine = load().Engine(1, isa)
        table, buffer, picked = (
            weight.add(engine) if group else add_halves(engine, bits, form),
            engine.buffer(96, False, False),
            engine.buffer(96, True, False),
        )
        engine.embed(table, 1.0, (buffer, 0, 96))
        engine.pick((buffer, 0, 96), (picked, 0, 96))
        engine.product(
            (picked, 0, 96), add_floats(engine, np.eye(96, dtype=np.float32)), -1, "store", (-1, 0, 96), True
        )
        engine.plan(64, 64)
        engine.bind(np.zeros(64, np.uint8), 1, 64, 64, "f32")
        out = np.empty((37, 96), np.float32)
        one = np.array([37], np.int32)
        engine.step(
            np.arange(37, dtype=np.int32), one * 0, one, one, np.array([0, 1], np.int32), one * 0, out
        )
        np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)
