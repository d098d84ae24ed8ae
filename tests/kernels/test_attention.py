"""Attention over pages against a plain float64 twin, and bit for bit against itself in other company."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.attention import CHUNK, Pool, Range, Stored, attend, plan
from kernels.reference.invariance import Evidence, attention_sizes, numbers, one_at_a_time, same_bits

KV_HEADS, SHARED, DIM = 2, 3, 16
HEADS = KV_HEADS * SHARED
SCALE = 0.25


@dataclass(frozen=True)
class Context:
    """One sequence: everything that was ever computed for it."""

    q: Tensor
    k: Tensor
    v: Tensor


def context(stream: int, tokens: int) -> Context:
    rows = numbers(stream, tokens, (HEADS + 2 * KV_HEADS) * DIM).view(tokens, -1, DIM)
    return Context(rows[:, :HEADS], rows[:, HEADS : HEADS + KV_HEADS], rows[:, HEADS + KV_HEADS :])


def run(
    parts: list[tuple[Context, int, int]],
    *,
    page_tokens: int = 16,
    run_tokens: int | None = None,
    window: int = 0,
    sizes: tuple[int, ...] | None = None,
    shuffle: int = 0,
    cap: float = 0.0,
    bmm: object = torch.bmm,
) -> list[Tensor]:
    """Rows [start, start + count) of each context, in one batch over scattered pages full of NaN."""
    run_tokens = run_tokens or page_tokens
    tables, used = [], 0
    for _, start, count in parts:
        tables.append(used + np.arange(-(-(start + count) // page_tokens)))
        used += len(tables[-1])
    order = np.random.default_rng(shuffle).permutation(used + 3)
    tables = [order[table] for table in tables]
    pages = torch.full((2, used + 3, KV_HEADS, page_tokens, DIM), torch.nan)
    ranges, queries = [], []
    row = 0
    for (source, start, count), table in zip(parts, tables, strict=True):
        for plane, values in enumerate((source.k, source.v)):
            for position in range(start + count):
                page = table[position // page_tokens]
                pages[plane, page, :, position % page_tokens] = values[position]
        ranges.append(Range(row, start, count, table))
        queries.append(source.q[start : start + count])
        row += count
    pool = Pool(page_tokens, KV_HEADS, run_tokens, KV_HEADS * page_tokens // run_tokens)
    sizes = sizes or attention_sizes(SHARED, DIM, Evidence())[0]
    groups = plan(ranges, pool, window=window, sizes=sizes)
    flat = pages.view(2, -1, run_tokens * DIM)
    out = attend(
        torch.cat(queries),
        Stored(flat[0]),
        Stored(flat[1]),
        groups,
        kv_heads=KV_HEADS,
        scale=SCALE,
        cap=cap,
        bmm=bmm,  # type: ignore[arg-type]
    )
    return list(torch.split(out, [count for _, _, count in parts]))


def exact(source: Context, start: int, count: int, window: int = 0, cap: float = 0.0) -> Tensor:
    q, k, v = (part.double() for part in (source.q[start : start + count], source.k, source.v))
    k, v = (part.repeat_interleave(SHARED, dim=1) for part in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q, k) * SCALE
    if cap:
        scores = cap * torch.tanh(scores / cap)
    seen, at = torch.arange(len(k))[None, :], torch.arange(start, start + count)[:, None]
    hidden = seen > at
    if window:
        hidden |= at - seen >= window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hrt,thd->rhd", weights, v).reshape(count, -1)


def test_scores_are_capped() -> None:
    parts = [(context(1, 300), 200, 100), (context(3, 5), 0, 5)]
    for (source, start, count), rows in zip(parts, run(parts, cap=1.5, window=100), strict=True):
        torch.testing.assert_close(rows.double(), exact(source, start, count, 100, 1.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 5, 64, 100])
@pytest.mark.parametrize("page_tokens", [4, 16, 64])
def test_agrees_with_the_plain_twin(window: int, page_tokens: int) -> None:
    parts = [
        (context(1, 300), 200, 100),
        (context(2, 70), 69, 1),
        (context(3, 5), 0, 5),
        (context(4, 64), 63, 1),
    ]
    found = run(parts, page_tokens=page_tokens, window=window)
    for (source, start, count), rows in zip(parts, found, strict=True):
        torch.testing.assert_close(rows.double(), exact(source, start, count, window), rtol=1e-5, atol=1e-5)


def test_a_window_sees_exactly_its_tokens() -> None:
    """Row i sees j with i - j < window: values are one-hot in time, so what is seen can be read off."""
    source = context(5, 90)
    k = torch.zeros_like(source.k)
    v = torch.zeros_like(source.v)
    v[40] = 1.0
    for window, last in ((10, 49), (64, 89)):
        rows = run([(Context(source.q, k, v), 0, 90)], window=window)[0]
        seen = [position for position in range(90) if bool((rows[position] > 0).any())]
        assert seen == list(range(40, min(last, 89) + 1))


@pytest.mark.parametrize("window", [0, 70])
def test_bits_do_not_depend_on_company_chunking_or_pages(window: int) -> None:
    source = context(6, 200)
    whole = run([(source, 0, 200)], window=window)[0]
    ways: dict[str, Tensor] = {
        "page size 8": run([(source, 0, 200)], page_tokens=8, window=window)[0],
        "page size 64": run([(source, 0, 200)], page_tokens=64, window=window)[0],
        "runs of one token": run([(source, 0, 200)], run_tokens=1, window=window)[0],
        "other pages": run([(source, 0, 200)], shuffle=9, window=window)[0],
        "one batch element at a time": run([(source, 0, 200)], window=window, bmm=one_at_a_time)[0],
        "only the base size": run([(source, 0, 200)], window=window, sizes=(16,))[0],
        "in company": run(
            [(context(7, 500), 499, 1), (source, 0, 200), (context(8, 130), 0, 130)], window=window
        )[1],
        "in pieces": torch.cat(
            [
                run([(source, start, end - start), (context(9, 70), 69, 1)], window=window)[0]
                for start, end in ((0, 1), (1, 7), (7, 64), (64, 130), (130, 199), (199, 200))
            ]
        ),
    }
    for way, rows in ways.items():
        assert same_bits(rows, whole), way


def test_a_single_row_beside_one_of_a_much_longer_context() -> None:
    short, long = context(10, 40), context(11, 1500)
    alone = run([(short, 39, 1)])[0]
    together = run([(long, 1499, 1), (short, 39, 1)])
    assert same_bits(together[1], alone)
    torch.testing.assert_close(together[0].double(), exact(long, 1499, 1), rtol=1e-5, atol=1e-5)


def test_nan_in_one_sequence_stays_there() -> None:
    good, bad = context(12, 100), context(13, 100)
    broken = Context(bad.q, torch.full_like(bad.k, torch.nan), bad.v)
    together = run([(broken, 90, 10), (good, 90, 10)])
    assert same_bits(together[1], run([(good, 90, 10)])[0])
    assert together[0].isnan().all()


def test_chunks_are_a_multiple_of_every_page_size() -> None:
    assert all(CHUNK % page_tokens == 0 for page_tokens in (8, 16, 32, 64))
