"""exp, stored numbers and norms of the CPU core beside numpy; and equal bits over instruction sets."""

import numpy as np
import pytest

from kernels.cpu import load
from tests.kernels.cpu_programs import ISAS, Floats, Rows, add_floats, normal


def exponentials(isa: str, x: Floats) -> Floats:
    out = np.empty_like(x)
    load().run_exp(isa, x, out)
    return out


@pytest.mark.parametrize("isa", ISAS)
def test_exp(isa: str) -> None:
    x = np.linspace(-87, 88, 100_003, dtype=np.float32)
    np.testing.assert_allclose(exponentials(isa, x), np.exp(x.astype(np.float64)), rtol=3e-7)
    edges = np.array([0, -0.0, -np.inf, -1e30, -88, np.inf, 1e30, 89, np.nan], np.float32)
    np.testing.assert_array_equal(
        exponentials(isa, edges), np.array([1, 1, 0, 0, 0, np.inf, np.inf, np.inf, np.nan], np.float32)
    )
    moved = exponentials(isa, x[3:17].copy())
    assert moved.tobytes() == exponentials(isa, x)[3:17].tobytes()


def test_exp_is_the_same_everywhere() -> None:
    x = np.concatenate([normal(1, 10_000) * 30, np.array([np.inf, -np.inf, 88.3, -87.3], np.float32)])
    assert len({exponentials(isa, x).tobytes() for isa in ISAS}) == 1


def every_kind_of_float() -> Floats:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    # Around the halves' subnormals, their overflow, and ties.
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1].astype(np.float64) + halves[1:]) / 2
    x = np.concatenate(
        [
            bits.view(np.float32),
            halves,
            -halves,
            ties.astype(np.float32),
            np.array([65519, 65520], np.float32),
        ]
    )
    return np.where(np.isnan(x), np.float32(1), x)


@pytest.mark.parametrize("isa", ISAS)
def test_stored_as_half(isa: str) -> None:
    x = every_kind_of_float()
    out = np.empty(2 * len(x), np.uint8)
    load().run_store(isa, x, "f16", out)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.view(np.uint16), x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("isa", ISAS)
def test_stored_as_bf16(isa: str) -> None:
    x = every_kind_of_float()
    out = np.empty(2 * len(x), np.uint8)
    load().run_store(isa, x, "bf16", out)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    np.testing.assert_array_equal(out.view(np.uint16), rounded.astype(np.uint16))


@pytest.mark.parametrize(("width", "group"), [(64, 64), (60, 20), (7, 7), (576, 576)])
def test_norm(width: int, group: int) -> None:
    x, weight = normal(1, 9, width), normal(2, group)
    found = {}
    for isa in ISAS:
        rows = Rows(x, isa=isa)
        view, engine = rows.picked(), rows.engine
        out = (engine.buffer(width, True, False), 0, width)
        engine.norm(view, engine.vector(weight), 1e-5, group, out, True)
        identity = add_floats(engine, np.eye(width, dtype=np.float32))
        engine.product(out, identity, -1, "store", (-1, 0, width), True)
        found[isa] = rows.run(width)
    grouped = x.reshape(-1, group).astype(np.float64)
    wanted = grouped / np.sqrt((grouped**2).mean(1, keepdims=True) + 1e-5) * weight
    for result in found.values():
        np.testing.assert_allclose(result, wanted.reshape(x.shape), rtol=1e-5, atol=1e-6)
    assert len({result.tobytes() for result in found.values()}) == 1
