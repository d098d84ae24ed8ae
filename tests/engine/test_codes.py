"""Codes with their scales and minima are exactly the stored values, for every type that has codes."""

import numpy as np
import pytest

from engine.weights.codes import codes
from engine.weights.dequant import dequantise
from text.gguf import GgmlType

CODED = [type_ for type_ in GgmlType if codes(memoryview(bytes(type_.type_size)), type_, 1) is not None]


def test_every_quantised_type_has_codes() -> None:
    names = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"
    assert {type_.name for type_ in CODED} == set(names.split())


@pytest.mark.parametrize("type_", CODED, ids=lambda type_: type_.name)
def test_codes_are_the_stored_values(type_: GgmlType) -> None:
    rows, blocks = 3, 40
    data = np.random.default_rng(1).integers(0, 256, (rows, blocks * type_.type_size)).astype(np.uint8)
    found = codes(memoryview(data.tobytes()), type_, rows)
    assert found is not None
    signed = found.codes.view(np.int8) if found.form == "i8" else found.codes
    assert signed.shape == (rows, blocks * type_.block_size)
    assert found.group == (16 if type_.name in ("Q2_K", "Q3_K", "Q6_K") else 32)
    with np.errstate(all="ignore"):
        values = signed * np.repeat(found.scales, found.group, axis=1)
        if found.minima is not None:
            values = values + np.repeat(found.minima, found.group, axis=1)
    wanted = dequantise(memoryview(data.tobytes()), type_).reshape(rows, -1)
    # Random bits hold scales that are no numbers too; as values those are no numbers either.
    np.testing.assert_array_equal(values, wanted)
