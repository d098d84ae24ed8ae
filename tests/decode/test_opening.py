from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from decode.opening import check, check_chain, extra_pages
from engine.sampling import SamplingParams
from mesh.errors import InvalidRequest
from tests.decode.openings import LIMITS, P, opening


@pytest.mark.parametrize("length", [1, P - 1, P, P + 1, 3 * P, 3 * P + 1])
def test_a_correct_request_is_taken_at_every_page_border(length: int) -> None:
    request = opening(range(length))
    check(request, LIMITS)
    check_chain(request, P)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (opening([]), "prompt"),
        (opening([1, 272]), "prompt"),
        (opening([1] * 512), "prompt"),
        (replace(opening(range(40)), block_ids=opening(range(30)).block_ids), "block_ids"),
        (replace(opening(range(40)), root_id=b"short"), "block_ids"),
        (opening(range(4), n=9), "n"),
        (opening(range(4), n=0), "n"),
        (opening(range(4), n=2, generated=1), "n"),
        (opening(range(4), generated=4), "generated"),
        (opening(range(4), generated=2, max_tokens=2), "max_tokens"),
        (opening(range(4), stop_ids=frozenset({272})), "stop_token_ids"),
        (opening(range(4), n=2, first_choice=2**32 - 2), "first_choice"),
        (opening(range(4), sampling=SamplingParams(temperature=nan)), "temperature"),
        (opening(range(4), sampling=SamplingParams(temperature=-1)), "temperature"),
        (opening(range(4), sampling=SamplingParams(top_p=nan)), "top_p"),
        (opening(range(4), sampling=SamplingParams(repetition_penalty=nan)), "repetition_penalty"),
        (opening(range(4), sampling=SamplingParams(repetition_penalty=0)), "repetition_penalty"),
        (opening(range(4), sampling=SamplingParams(presence_penalty=inf)), "presence_penalty"),
        (opening(range(4), sampling=SamplingParams(logit_bias={1: nan})), "logit_bias"),
        (opening(range(4), sampling=SamplingParams(logit_bias={272: 1.0})), "logit_bias"),
        (opening(range(4), sampling=SamplingParams(logprobs=21)), "logprobs"),
    ],
)
def test_a_wrong_request_names_the_field(wrong: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check(wrong, LIMITS)  # type: ignore[arg-type]
    assert error.value.param == param


def test_what_never_fits_the_pool_is_refused_with_both_numbers() -> None:
    limits = replace(LIMITS, pages=5)
    check(opening(range(4 * P), max_tokens=2), limits)
    with pytest.raises(InvalidRequest, match="6 KV pages and the pool has 5"):
        check(opening(range(5 * P), max_tokens=2), limits)


def test_ids_of_other_tokens_are_refused() -> None:
    wrong = replace(opening(range(40)), tokens=tuple(range(1, 41)))
    with pytest.raises(InvalidRequest, match="not those of the prompt"):
        check_chain(wrong, P)


@pytest.mark.parametrize(
    ("length", "n", "max_tokens", "pages"),
    [
        (5, 1, 1, 1),  # one token, in the page of the tail
        (5, 1, 12, 1),  # the last token needs no room: 5 + 11 = 16
        (5, 1, 13, 2),
        (16, 1, 1, 1),
        (16, 1, 2, 2),
        (5, 3, 4, 3),  # two copies of the unfinished page
        (16, 3, 2, 4),  # nothing to copy, one page of growth each
    ],
)
def test_extra_pages_are_the_tail_the_copies_and_first_growth(
    length: int, n: int, max_tokens: int, pages: int
) -> None:
    assert extra_pages(opening(range(length), n=n, max_tokens=max_tokens), P) == pages
