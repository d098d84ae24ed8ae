"""The reference: a row's result does not depend on its company: bit for bit, over chunking, neighbours, pages, position."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import engine
from engine import Executor, Slice
from engine.executor import Logits
from tests.engine.pools import bind, rows, run

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 256, 200)]
PAGES = list(range(3, 60))


def load(source: str, *, kv_dtype: str = "f32", **options: Any) -> Executor:
    return engine.load(source, executor="reference", kv_dtype=kv_dtype, **options)


def same_bits(a: Logits, b: Logits) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.fixture(scope="module", params=["f32", "f16", "bf16", "int8"])
def tiny(request: pytest.FixtureRequest) -> Executor:
    return load("tiny:seed=3", kv_dtype=request.param)


@pytest.fixture
def whole(tiny: Executor) -> Logits:
    bind(tiny, 64)
    return run(tiny, TOKENS, PAGES, [len(TOKENS)])


@pytest.mark.parametrize("chunks", [[1] * 200, [7] * 28 + [4], [64, 64, 64, 8], [199, 1], [16] * 12 + [8]])
def test_chunking(tiny: Executor, whole: Logits, chunks: list[int]) -> None:
    bind(tiny, 64)
    assert same_bits(run(tiny, TOKENS, PAGES, chunks), whole)


@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64])
def test_page_size(page_tokens: int) -> None:
    reference = load("tiny:seed=3")
    bind(reference, 64)
    wanted = run(reference, TOKENS, PAGES, [len(TOKENS)])
    other = load("tiny:seed=3", page_tokens=page_tokens)
    bind(other, 64)
    assert other.info.numerics_id == reference.info.numerics_id
    assert same_bits(run(other, TOKENS, PAGES, [100, 1, 99]), wanted)


def test_order_and_distance_of_pages(tiny: Executor, whole: Logits) -> None:
    bind(tiny, 64, page_bytes=tiny.info.layout.page_bytes + 64)
    assert same_bits(run(tiny, TOKENS, PAGES[::-1], [100, 100]), whole)


def test_company(tiny: Executor, whole: Logits) -> None:
    """One token at a time beside prefills and decodes of others, at changing places in the batch."""
    executor = tiny
    bind(executor, 128)
    others = [list(range(64 + 8 * i, 72 + 8 * i)) for i in range(8)]
    found = []
    for position, token in enumerate(TOKENS[:100]):
        company = [
            Slice(TOKENS[i : i + 1 + position % 9 * (i % 2)], 0, others[i], 1) for i in range(position % 8)
        ]
        place = position % (len(company) + 1)
        batch = [*company[:place], Slice([token], position, PAGES, 1), *company[place:]]
        found.append(rows(executor.step(batch)[place]))
    assert same_bits(np.concatenate(found), whole[:100])


def test_a_neighbour_that_fails(tiny: Executor, whole: Logits) -> None:
    bind(tiny, 64)
    batch = [Slice([5], 0, [999], 1), Slice(TOKENS, 0, PAGES, 200), Slice([5], 10, [1], 1)]
    results = tiny.step(batch)
    assert isinstance(results[0], engine.SliceFailure)
    assert same_bits(rows(results[1]), whole)
    # The third reads a page that nobody wrote: its numbers are no numbers, and only its.
    assert not np.isfinite(rows(results[2])).all()


def test_keys_and_values_survive_in_pages_alone(tiny: Executor, whole: Logits) -> None:
    """A second executor takes the pages of the first one over: nothing else is kept between steps."""
    arena = bind(tiny, 64)
    run(tiny, TOKENS[:150], PAGES, [150])
    heir = load("tiny:seed=3", kv_dtype=tiny.info.kv_dtype)
    heir.bind(arena, 64, heir.info.layout.page_bytes)
    last = rows(heir.step([Slice(TOKENS[150:], 150, PAGES, 50)])[0])
    assert same_bits(last, whole[150:])


def test_threads_and_leaving_logits_out_change_no_page() -> None:
    one = load("tiny:seed=3,layers=1")
    bind_one = bind(one, 16)
    run(one, TOKENS[:100], range(16), [100])
    without = load("tiny:seed=3,layers=1", threads=2, logits=False)
    bind_without = bind(without, 16)
    assert without.step([Slice(TOKENS[:100], 0, range(16), 0)]) == [None]
    assert bind_one == bind_without
    assert without.info.numerics_id == one.info.numerics_id
    assert without.info.weights_digest == one.info.weights_digest


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_in_another_thread(threads: int) -> None:
    executor = load("tiny:seed=3", threads=threads)
    bind(executor, 64)
    wanted = run(executor, TOKENS, PAGES, [len(TOKENS)])
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run, executor, TOKENS, PAGES, [1] * 40 + [160]).result()
    assert same_bits(found, wanted)


@pytest.mark.model
def test_real_weights(real_model: Executor) -> None:
    executor = real_model
    bind(executor, 24)
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, 49000, 90)]
    pages = list(range(8))
    wanted = run(executor, tokens, pages, [90])
    assert same_bits(run(executor, tokens, pages, [64, 1, 20, 5]), wanted)
    for neighbours in (1, 3):
        batch = [Slice([7 + i], 0, [8 + i], 1) for i in range(neighbours)]
        results = executor.step([*batch, Slice(tokens[80:], 80, pages, 10)])
        assert same_bits(rows(results[-1]), wanted[80:])
