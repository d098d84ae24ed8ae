import numpy as np
import pytest
import torch

from engine.rope import Turns, rope_table
from kernels.reference.elementwise import gelu_gate, rms_norm, rope, silu_gate, soft_cap
from kernels.reference.invariance import numbers


def test_norm_gives_rows_of_unit_mean_square_times_the_weight() -> None:
    x, weight = numbers(1, 5, 48), numbers(2, 1, 48)[0]
    exact = x.double()
    exact = exact / torch.sqrt((exact * exact).mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-6)


def test_norm_over_heads_of_a_strided_value() -> None:
    x = numbers(1, 5, 96)[:, 10:58]
    weight = torch.ones(48)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    dim, positions = 16, torch.tensor([0, 1, 7, 3000])
    cos, sin = map(torch.from_numpy, rope_table(4096, Turns(dim, 10000.0)))
    x = numbers(3, 4 * 3, dim).view(4, 3, dim)
    turned = rope(x, cos[positions][:, None], sin[positions][:, None], interleaved=interleaved)
    pairs = x.view(4, 3, dim // 2, 2) if interleaved else x.view(4, 3, 2, dim // 2).transpose(2, 3)
    complexes = torch.complex(pairs[..., 0].double(), pairs[..., 1].double())
    angles = positions[:, None].double() * (10000.0 ** -(torch.arange(0, dim, 2).double() / dim))
    expected = torch.view_as_real(complexes * torch.polar(torch.ones_like(angles), angles)[:, None])
    wanted = expected.reshape(4, 3, dim) if interleaved else expected.transpose(2, 3).reshape(4, 3, dim)
    torch.testing.assert_close(turned.double(), wanted, rtol=0, atol=2e-3)
    torch.testing.assert_close(turned[:3].double(), wanted[:3], rtol=0, atol=1e-6)


def test_divisors_and_a_linear_factor_slow_the_turns_down() -> None:
    cos, _ = rope_table(9, Turns(4, 10000.0, "linear", 2.0), np.array([2.0, 4.0], np.float32))
    np.testing.assert_allclose(cos[8], np.cos([2.0, 0.01]), rtol=1e-6)


def test_silu_gate() -> None:
    gate, up = numbers(4, 3, 20) * 5, numbers(5, 3, 20)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_gate(gate, up).double(), expected, rtol=1e-5, atol=1e-6)


def test_silu_gate_of_very_small_numbers_is_zero() -> None:
    result = silu_gate(torch.tensor([[-1e4, -200.0]]), torch.ones(1, 2))
    assert torch.equal(result, torch.zeros(1, 2))


def test_gelu_gate() -> None:
    gate, up = numbers(4, 3, 20) * 5, numbers(5, 3, 20)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    torch.testing.assert_close(gelu_gate(gate, up).double(), expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(gelu_gate(torch.tensor([[-1e4]]), torch.ones(1, 1)), torch.zeros(1, 1))


def test_soft_cap() -> None:
    x = numbers(4, 3, 20) * 50
    torch.testing.assert_close(soft_cap(x, 30.0), 30 * torch.tanh(x / 30), rtol=1e-5, atol=1e-5)
