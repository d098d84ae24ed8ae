"""The tables of every rope variant beside the functions of `transformers`."""

from typing import Any

import numpy as np
import pytest

from engine.rope import Turns, frequencies, llama3_divisors, rope_table, yarn_magnitude

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

CASES: list[tuple[dict[str, Any], Turns, int]] = [
    ({"rope_type": "linear", "factor": 4.0}, Turns(32, 1e4, "linear", 4.0), 0),
    ({"rope_type": "dynamic", "factor": 2.0}, Turns(32, 1e4, "dynamic", 2.0, 256), 200),
    ({"rope_type": "dynamic", "factor": 2.0}, Turns(32, 1e4, "dynamic", 2.0, 256), 1000),
    (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        Turns(32, 1e4, "yarn", 8.0, 64, magnitude=yarn_magnitude(8.0)),
        0,
    ),
    (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
        Turns(32, 1e4, "yarn", 8.0, 64, truncate=False, magnitude=yarn_magnitude(8.0)),
        0,
    ),
]


def published(rope: dict[str, Any], length: int) -> tuple[Any, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 1e4, **rope},
    )
    speeds, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=length or None
    )
    return speeds.numpy(), magnitude


@pytest.mark.parametrize(("rope", "turns", "length"), CASES, ids=str)
def test_frequencies(rope: dict[str, Any], turns: Turns, length: int) -> None:
    speeds, magnitude = published(rope, length)
    np.testing.assert_allclose(frequencies(turns, length=length), speeds, rtol=3e-7)
    assert turns.magnitude == pytest.approx(magnitude)


def test_llama3() -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    speeds, _ = published(rope, 0)
    divisors = llama3_divisors(1e4, 32, factor=8.0, low=1.0, high=4.0, original=64)
    np.testing.assert_allclose(frequencies(Turns(32, 1e4), divisors), speeds, rtol=3e-7)


def test_magnitude_scales_the_table() -> None:
    plain, scaled = rope_table(8, Turns(8, 1e4)), rope_table(8, Turns(8, 1e4, magnitude=1.5))
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(other, one * np.float32(1.5), rtol=1e-6)
