"""What cannot be is refused where a program is built, with the operation at fault, and never computed."""

from collections.abc import Callable

import numpy as np
import pytest

from kernels.cpu import load
from kernels.cpu.interface import CoreEngine
from tests.kernels.cpu_programs import Coded, add_floats, normal

MOST = 2**31 - 1


class Built:
    """An engine with a buffer of 64 numbers, one of 64 quantised, and weights of 64 columns."""

    def __init__(self) -> None:
        self.engine: CoreEngine = load().Engine(1, "")
        self.buffer = self.engine.buffer(64, False, False)
        self.picked = self.engine.buffer(64, True, False)
        self.quantised = self.engine.buffer(64, False, True)
        self.x = (self.buffer, 0, 64)
        self.floats = add_floats(self.engine, normal(1, 16, 64))
        self.codes = Coded.random("i8", 16, 64, half=False, minima=False, group=16).add(self.engine)
        self.vector = self.engine.vector(np.ones(64, np.float32))
        table = np.ones((8, 4), np.float32)
        self.rope = self.engine.rope_table(table, table)


Call = Callable[[Built], object]
OPERATIONS: dict[str, tuple[Call, str]] = {
    "embed without a weight": (lambda b: b.engine.embed(9, 1.0, b.x), "no such weight"),
    "embed of another width": (lambda b: b.engine.embed(b.floats, 1.0, (b.buffer, 0, 32)), "another width"),
    "a buffer that is not there": (lambda b: b.engine.embed(b.floats, 1.0, (99, 0, 64)), "fit"),
    "columns beyond the buffer": (lambda b: b.engine.embed(b.floats, 1.0, (b.buffer, 1, 64)), "fit"),
    "columns from below zero": (lambda b: b.engine.embed(b.floats, 1.0, (b.buffer, -1, 64)), "fit"),
    "columns whose end overflows": (lambda b: b.engine.embed(b.floats, 1.0, (b.buffer, MOST, MOST)), "fit"),
    "norm without its vector": (lambda b: b.engine.norm(b.x, -1, 1e-5, 64, b.x, False), "no such vector"),
    "norm of another size": (lambda b: b.engine.norm(b.x, b.vector, 1e-5, 32, b.x, False), "another width"),
    "norm of nothing": (lambda b: b.engine.norm(b.x, b.vector, 1e-5, 0, b.x, False), "widths differ"),
    "codes with rows of floats": (
        lambda b: b.engine.product(b.x, b.codes, -1, "store", (b.buffer, 0, 16), False),
        "input does not fit",
    ),
    "floats with quantised rows": (
        lambda b: b.engine.product((b.quantised, 0, 64), b.floats, -1, "store", (b.buffer, 0, 16), False),
        "input does not fit",
    ),
    "a bias of another width": (
        lambda b: b.engine.product(
            (b.quantised, 0, 64), b.codes, b.vector, "store", (b.buffer, 0, 16), False
        ),
        "bias",
    ),
    "an unknown end": (
        lambda b: b.engine.product((b.quantised, 0, 64), b.codes, -1, "gelu9", (b.buffer, 0, 16), False),
        "gelu9",
    ),
    "rope of other pairs": (lambda b: b.engine.rope(b.x, 4, 16, b.rope, False), "other pairs"),
    "heads whose product overflows": (
        lambda b: b.engine.write_kv(b.x, b.x, 1 << 16, 1 << 16, 0, 0, 0),
        "heads",
    ),
    "attention whose product overflows": (
        lambda b: b.engine.attend(b.x, 1 << 16, 1 << 10, 1 << 6, 1.0, 0, 0.0, 0, 0, 0, b.x),
        "heads",
    ),
    "attention of no heads": (lambda b: b.engine.attend(b.x, 0, 1, 64, 1.0, 0, 0.0, 0, 0, 0, b.x), "heads"),
    "a window below zero": (lambda b: b.engine.attend(b.x, 1, 1, 64, 1.0, -1, 0.0, 0, 0, 0, b.x), "heads"),
    "lines that are picked and not": (lambda b: b.engine.pick((b.picked, 0, 64), (b.picked, 0, 64)), "fit"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_cannot_be(name: str) -> None:
    call, message = OPERATIONS[name]
    with pytest.raises(ValueError, match=message):
        call(Built())


def test_the_operation_at_fault_is_named() -> None:
    built = Built()
    built.engine.embed(built.floats, 1.0, built.x)
    with pytest.raises(ValueError, match="operation 1"):
        built.engine.norm(built.x, 7, 1e-5, 64, built.x, False)


@pytest.mark.parametrize(
    ("form", "rows", "columns", "half", "minima", "group", "message"),
    [
        ("u5", 16, 32, False, False, 32, "u5"),
        ("u4", 0, 32, False, False, 32, "size"),
        ("u4", -1, 32, False, False, 32, "size"),
        ("u4", MOST, MOST, False, False, 32, "size"),
        ("u4", 16, 48, False, False, 32, "whole number of groups"),
        ("i8", 16, 32, True, False, 16, "f32"),
        ("i8", 16, 32, False, False, 8, "16 or of 32"),
        ("f16", 16, 32, False, False, 0, "16 or of 32"),
    ],
)
def test_weights_that_cannot_be(
    form: str, rows: int, columns: int, half: bool, minima: bool, group: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load().packed_bytes(form, rows, columns, half, minima, group)
    with pytest.raises(ValueError, match=message):
        load().Engine(1, "").weight(form, rows, columns, half, minima, group, np.zeros(64, np.uint8))


@pytest.mark.parametrize("form", ["u4", "i8", "f32", "f16", "bf16"])
def test_a_packed_weight_that_is_cut_short(form: str) -> None:
    size = load().packed_bytes(form, 17, 64, False, False, 32)
    load().Engine(1, "").weight(form, 17, 64, False, False, 32, np.zeros(size, np.uint8))
    with pytest.raises(ValueError, match="longer than its memory"):
        load().Engine(1, "").weight(form, 17, 64, False, False, 32, np.zeros(size - 1, np.uint8))


def test_tables_that_do_not_fit_the_codes() -> None:
    codes, out = np.zeros((16, 64), np.uint8), np.zeros(1 << 16, np.uint8)
    for scales in (
        np.zeros((16, 4), np.float32),
        np.zeros((15, 2), np.float32),
        np.zeros((16, 0), np.float32),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            load().pack_codes("i8", False, 32, codes, scales, None, out)
    good = np.zeros((16, 2), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        load().pack_codes("i8", False, 32, codes, good, np.zeros((16, 4), np.float32), out)
    with pytest.raises(ValueError, match="do not fit"):
        load().pack_codes("i8", False, 32, codes, good, None, out[:100])
    with pytest.raises(ValueError, match="no half"):
        load().pack_halves("f32", np.zeros((16, 64), np.uint16), out)
    with pytest.raises(ValueError, match="does not fit"):
        load().pack_halves("f16", np.zeros((16, 64), np.uint16), out[:100])


@pytest.mark.parametrize("page_tokens", [0, -1, 3, 128, MOST])
def test_pages_of_tokens_that_do_not_divide_a_chunk(page_tokens: int) -> None:
    built = Built()
    built.engine.embed(built.floats, 1.0, built.x)
    built.engine.plan(4, 8)
    with pytest.raises(ValueError, match="divide 64"):
        built.engine.bind(np.zeros(64, np.uint8), 1, 64, page_tokens, "f32")


@pytest.mark.parametrize("offsets", [(1 << 40, 0, 0), (0, 1 << 63, 0), (0, 0, 1200), (0, 2049 - 1024, 0)])
def test_planes_that_leave_their_page(offsets: tuple[int, int, int]) -> None:
    """8-bit pages of 16 tokens: 1,024 bytes of keys, as many of values, 128 of scales."""
    built = Built()
    built.engine.embed(built.floats, 1.0, built.x)
    built.engine.write_kv(built.x, built.x, 1, 64, *offsets)
    built.engine.plan(4, 8)
    arena = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match=r"a plane leaves its page \(operation 1\)"):
        built.engine.bind(arena, 2, 1280 if offsets[2] else 2048, 16, "int8")


def test_plans_that_cannot_be() -> None:
    for rows, context in ((0, 8), (-1, 8), (1 << 21, 8), (4, 0), (4, 100)):
        with pytest.raises(ValueError, match=r"plan|shorter"):
            Built().engine.plan(rows, context)
