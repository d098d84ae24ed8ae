import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Sampled, SampleFailure, SampleRow, SamplingParams, sample, uniform

VOCAB = 300
LOGITS = np.random.default_rng(0).normal(0, 3, (8, VOCAB)).astype(np.float32)

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-12, 1e-6, 1e-4, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 299, 300, 305]),
    top_p=st.sampled_from([1e-9, 0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 5]),
)
rows_strategy = st.builds(
    SampleRow,
    params=params_strategy,
    choice=st.integers(0, 3),
    position=st.integers(0, 1000),
    context=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    prompt_len=st.integers(0, 20),
    banned=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)


def one(logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]], row: SampleRow) -> Sampled:
    result = sample(logits[None], [row])[0]
    assert isinstance(result, Sampled), result
    return result


def token(params: SamplingParams, *, position: int = 0, choice: int = 0, line: int = 0) -> int:
    return one(LOGITS[line], SampleRow(params, choice, position)).token


def tokens(params: SamplingParams, count: int = 300) -> list[int]:
    return [token(params, position=position) for position in range(count)]


@settings(deadline=None)
@given(st.lists(rows_strategy, min_size=1, max_size=8), st.randoms())
def test_a_row_does_not_depend_on_its_neighbours(rows: list[SampleRow], random: object) -> None:
    together = sample(LOGITS[: len(rows)], rows)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    mixed = sample(LOGITS[order], [rows[i] for i in order])
    for place, index in enumerate(order):
        assert mixed[place] == together[index] == sample(LOGITS[index : index + 1], [rows[index]])[0]


@settings(deadline=None)
@given(rows_strategy)
def test_what_is_chosen_is_a_token_that_is_not_banned(row: SampleRow) -> None:
    result = one(LOGITS[0], row)
    assert 0 <= result.token < VOCAB
    assert result.token not in row.banned
    assert (result.logprob is None) == (row.params.logprobs is None)
    assert len(result.top) == (row.params.logprobs or 0)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=1e-9, min_p=1.0, seed=3)
    assert set(tokens(params, 10)) == {int(LOGITS[0].argmax())}


def test_a_small_temperature_does_not_overflow() -> None:
    huge = LOGITS * np.float32(1e30)
    for temperature in (1e-4, 0.01, 1.0):
        result = one(huge[0], SampleRow(SamplingParams(temperature=temperature), 0, 0))
        assert result.token == int(LOGITS[0].argmax())


def test_ties_of_greedy_go_to_the_lowest_id() -> None:
    flat = np.zeros(VOCAB, np.float32)
    assert one(flat, SampleRow(SamplingParams(temperature=0), 0, 0)).token == 0
    assert one(flat, SampleRow(SamplingParams(temperature=0, logit_bias={3: 1, 9: 1}), 0, 0)).token == 3


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    drawn = [one(logits, SampleRow(SamplingParams(seed=11), 0, i)).token for i in range(4000)]
    share = np.bincount(drawn, minlength=3) / 4000
    np.testing.assert_allclose(share, [0.5, 0.3, 0.2], atol=0.03)


def test_streams_are_keyed_by_seed_choice_and_position() -> None:
    base = [uniform(7, 0, position) for position in range(200)]
    assert base == [uniform(7, 0, position) for position in range(200)]
    assert all(0 <= value < 1 for value in base)
    others = [uniform(8, 0, p) for p in range(200)], [uniform(7, 1, p) for p in range(200)]
    assert len({*base, *others[0], *others[1]}) == 600
    assert 0.4 < float(np.mean(base)) < 0.6


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1])
def test_any_seed_works(seed: int) -> None:
    assert 0 <= token(SamplingParams(seed=seed)) < VOCAB


def test_top_k_keeps_the_best_k() -> None:
    best = set(np.argsort(LOGITS[0])[-5:].tolist())
    assert set(tokens(SamplingParams(temperature=2.0, top_k=5))) <= best
    assert len(set(tokens(SamplingParams(temperature=2.0, top_k=5)))) > 1
    assert set(tokens(SamplingParams(temperature=2.0, top_k=1), 20)) == {int(LOGITS[0].argmax())}


@pytest.mark.parametrize("top_k", [0, VOCAB, VOCAB + 5])
def test_top_k_of_everything_is_off(top_k: int) -> None:
    assert tokens(SamplingParams(top_k=top_k, seed=5)) == tokens(SamplingParams(seed=5))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [50, 5000])
def test_top_p_keeps_the_smallest_nucleus(top_p: float, size: int) -> None:
    logits = np.random.default_rng(4).normal(0, 1, size).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p)
    nucleus = set(order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1].tolist())
    drawn = {one(logits, SampleRow(SamplingParams(top_p=top_p, seed=i), 0, i)).token for i in range(300)}
    assert drawn <= nucleus
    assert len(drawn) >= min(len(nucleus), 20)


def test_top_p_counts_within_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    drawn = {
        one(logits, SampleRow(SamplingParams(top_k=2, top_p=0.57, seed=i), 0, 0)).token for i in range(100)
    }
    assert drawn == {0}


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log(np.array([0.5, 0.26, 0.2, 0.04], np.float32))
    drawn = {one(logits, SampleRow(SamplingParams(min_p=0.5, seed=i), 0, 0)).token for i in range(200)}
    assert drawn == {0, 1}


def test_penalties() -> None:
    logits = np.array([2.0, 1.5, -1.0, -1.2], np.float32)

    def greedy(context: list[int], prompt_len: int, **penalties: float) -> int:
        params = SamplingParams(temperature=0, **penalties)  # type: ignore[arg-type]
        return one(logits, SampleRow(params, 0, 0, context, prompt_len)).token

    # Repetition counts the prompt too; presence and frequency only the output.
    assert greedy([0], 1, repetition_penalty=2.0) == 1
    assert greedy([0], 1, presence_penalty=2.0) == 0
    assert greedy([0], 0, presence_penalty=0.6) == 1
    assert greedy([0], 0, frequency_penalty=0.3) == 0
    assert greedy([0, 0], 0, frequency_penalty=0.3) == 1
    # A negative logit is made smaller, not larger.
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={0: -100, 1: -100})
    assert one(logits, SampleRow(params, 0, 0, [2], 1)).token == 3


def test_bias_and_bans() -> None:
    row = SampleRow(SamplingParams(temperature=0, logit_bias={VOCAB - 1: 100.0}), 0, 0)
    assert one(LOGITS[0], row).token == VOCAB - 1
    banned = SampleRow(SamplingParams(temperature=0, logit_bias={7: 100.0}), 0, 0, banned=[7])
    assert one(LOGITS[0], banned).token == int(LOGITS[0].argmax())


@pytest.mark.parametrize("bad", [VOCAB, -1, 10**9])
def test_a_biased_id_outside_the_vocabulary_fails_its_row_alone(bad: int) -> None:
    rows = [
        SampleRow(SamplingParams(temperature=0, logit_bias={bad: 5.0}), 0, 0),
        SampleRow(SamplingParams(temperature=0), 0, 0),
    ]
    failed, fine = sample(LOGITS[:2], rows)
    assert isinstance(failed, SampleFailure)
    assert str(bad) in failed.message
    assert fine == Sampled(int(LOGITS[1].argmax()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_row_alone(value: float, temperature: float) -> None:
    logits = LOGITS[:3].copy()
    logits[1, 17] = value
    row = SampleRow(SamplingParams(temperature=temperature, seed=1, logprobs=2), 0, 0)
    results = sample(logits, [row] * 3)
    assert isinstance(results[1], SampleFailure)
    assert results[0] == sample(LOGITS[:1], [row])[0]
    assert results[2] == sample(LOGITS[2:3], [row])[0]


def test_everything_banned_is_a_failure() -> None:
    row = SampleRow(SamplingParams(), 0, 0, banned=range(VOCAB))
    assert isinstance(sample(LOGITS[:1], [row])[0], SampleFailure)


def test_log_probabilities_are_those_of_the_unmodified_distribution() -> None:
    exact = LOGITS[0].astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum())
    params = SamplingParams(temperature=0.3, top_k=3, logit_bias={5: 50.0}, logprobs=4)
    result = one(LOGITS[0], SampleRow(params, 0, 0))
    assert result.token == 5
    assert result.logprob == pytest.approx(exact[5], abs=1e-12)
    assert [index for index, _ in result.top] == np.argsort(-exact)[:4].tolist()
    np.testing.assert_allclose([lp for _, lp in result.top], np.sort(exact)[::-1][:4], atol=1e-12)


def test_more_alternatives_than_tokens() -> None:
    result = one(LOGITS[0, :3], SampleRow(SamplingParams(temperature=0, logprobs=20), 0, 0))
    assert len(result.top) == 3


def test_a_batch_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="rows"):
        sample(LOGITS[:2], [SampleRow(SamplingParams(), 0, 0)])
