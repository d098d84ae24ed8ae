"""Dequantisation against oracle blocks, bit for bit."""

import numpy as np
import pytest

from engine import WeightError
from engine.weights.dequant import dequantise, supported
from tests.engine.pools import oracle
from text.gguf import GgmlType

NUMBERS = ["F32", "F16", "BF16"]
GROUPS_OF_32 = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"]
GROUPS_OF_256 = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
TYPES = [*NUMBERS, *GROUPS_OF_32, *GROUPS_OF_256]


@pytest.mark.parametrize("name", TYPES)
def test_bits_are_those_of_the_oracle(name: str) -> None:
    data = np.load(oracle(f"dequant/{name}.npz"))
    found = dequantise(memoryview(data["raw"].tobytes()), GgmlType[name])
    assert found.dtype == np.float32
    assert found.tobytes() == data["values"].tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_many_blocks_are_as_one_at_a_time(name: str) -> None:
    kind = GgmlType[name]
    random = np.random.default_rng(0).integers(0, 256, (20_000, kind.type_size), dtype=np.uint8)
    whole = dequantise(random, kind).reshape(-1, kind.block_size)
    for index in (0, 1, 9_999, 19_999):
        assert dequantise(random[index], kind).tobytes() == whole[index].tobytes()


def test_a_type_that_cannot_be_read_is_an_error() -> None:
    assert not supported(GgmlType.IQ1_S)
    with pytest.raises(WeightError, match="IQ1_S"):
        dequantise(memoryview(bytes(50)), GgmlType.IQ1_S)


def test_half_a_block_is_an_error() -> None:
    with pytest.raises(WeightError, match="whole number of Q8_0 blocks"):
        dequantise(memoryview(bytes(35)), GgmlType.Q8_0)
