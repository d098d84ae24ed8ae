import pytest
import torch
from torch import Tensor

from kernels.reference.invariance import (
    Evidence,
    agreeing_sizes,
    attention_sizes,
    elementwise_problem,
    numbers,
    same_bits,
)
from kernels.reference.products import PackedProduct, PlainProduct, multiply
from kernels.reference.rows import BASE_ROWS


@pytest.mark.parametrize("kind", [PackedProduct, PlainProduct])
@pytest.mark.parametrize(("outputs", "columns"), [(96, 32), (272, 32), (300, 576)])
def test_any_number_of_rows_gives_the_same_bits_per_row(
    kind: type[PackedProduct] | type[PlainProduct], outputs: int, columns: int
) -> None:
    product = kind(numbers(0, outputs, columns))
    sizes = agreeing_sizes(product, columns, Evidence())
    assert sizes is not None
    assert BASE_ROWS in sizes
    x = numbers(9, 150, columns)
    whole = multiply(x, product, sizes, outputs)
    for start, count in ((0, 1), (149, 1), (3, 2), (7, 5), (20, 16), (1, 33), (11, 127)):
        part = multiply(x[start : start + count].contiguous(), product, sizes, outputs)
        assert same_bits(part, whole[start : start + count])


def test_products_are_close_to_exact() -> None:
    weight, x = numbers(0, 300, 576), numbers(1, 40, 576)
    exact = x.double() @ weight.double().t()
    for kind in (PackedProduct, PlainProduct):
        found = multiply(x, kind(weight), (BASE_ROWS,), 300)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-3)


def test_row_by_row_is_the_last_resort() -> None:
    weight, x = numbers(0, 20, 8), numbers(1, 5, 8)
    product = PlainProduct(weight)
    rows = torch.cat([product(x[i : i + 1]) for i in range(5)])
    assert same_bits(multiply(x, product, (1,), 20), rows)


def test_sizes_that_round_differently_are_found_out() -> None:
    weight = numbers(0, 24, 64).t()

    def product(x: Tensor) -> Tensor:
        if len(x) in (1, 64):  # another order of the same sum
            return torch.mm(x[:, :32], weight[:32]) + torch.mm(x[:, 32:], weight[32:])
        return torch.mm(x.repeat(2, 1), weight)[: len(x)] if len(x) < 8 else torch.mm(x, weight)

    sizes = agreeing_sizes(product, 64, Evidence())
    assert sizes is not None
    assert {1, 64}.isdisjoint(sizes)
    assert {16, 32} <= set(sizes)


def test_a_product_that_looks_at_other_rows_is_refused() -> None:
    weight = numbers(0, 24, 64).t()

    def product(x: Tensor) -> Tensor:
        return torch.mm(x, weight) + x.sum() * 1e-6

    assert agreeing_sizes(product, 64, Evidence()) is None


def test_attention_has_sizes_for_common_shapes() -> None:
    for shared, dim in ((3, 64), (1, 8), (4, 256)):
        sizes, _ = attention_sizes(shared, dim, Evidence())
        assert BASE_ROWS in sizes


def test_exp_and_sum_of_this_torch_keep_the_promise() -> None:
    assert elementwise_problem({32, 576}, Evidence()) is None


def test_evidence_tells_different_rounding_apart() -> None:
    product = PlainProduct(numbers(0, 24, 64))
    one, same, other = Evidence(), Evidence(), Evidence()
    agreeing_sizes(product, 64, one)
    agreeing_sizes(product, 64, same)
    agreeing_sizes(lambda x: product(x) * (1 + 2**-23), 64, other)
    assert one.hexdigest() == same.hexdigest() != other.hexdigest()
