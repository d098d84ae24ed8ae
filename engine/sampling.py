"""From logits to tokens.

Order: grammar, banned ids, logit bias, repetition, presence and frequency penalties; then temperature, top-k,
top-p, min-p, draw. Log-probabilities are those of the unmodified distribution. Each row draws from its own
counter-based stream keyed by (seed, choice, position), and every row is computed by itself in float64, so
that its result is the same alone and in any batch. A row with logits that are no numbers fails alone.

Knows nothing of torch, requests or pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would only overflow."""

Float64s = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; each default is the neutral value."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    """Alternatives per position; None for no log-probabilities at all."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """True where the logits themselves are not changed before the choice."""
        return (
            not self.logit_bias
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
        )


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to sample for."""

    params: SamplingParams
    choice: int
    """Index of the choice among the request's `n`."""
    position: int
    """How many tokens this choice has generated before, by whatever worker."""
    context: Sequence[int] = ()
    """Prompt and output so far; only penalties look at it."""
    prompt_len: int = 0
    """How many tokens of the context are prompt."""
    banned: Sequence[int] = ()
    """Ids that may not be chosen, such as the end tokens below min_tokens."""
    allowed: NDArray[np.bool_] | None = None
    """What a grammar allows, [vocab]; None: everything. Where it allows nothing but banned ids, it wins."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """Alternatives (id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class SampleFailure:
    message: str


def sample(logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled | SampleFailure]:
    """Chooses one token per row of `logits` [rows, vocab]."""
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"logits of shape {logits.shape} for {len(rows)} rows")
    return [_sample_row(logits[index], row) for index, row in enumerate(rows)]


def score(logits: NDArray[np.float32], tokens: Sequence[int], count: int) -> list[Sampled | SampleFailure]:
    """What each row of `logits` [rows, vocab] said of the token after it, with `count` alternatives."""
    return [
        _with_logprobs(token, row, count)
        if np.isfinite(row).all()
        else SampleFailure("the model gave logits that are no numbers")
        for row, token in zip(logits, tokens, strict=True)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, choice, position): a counter-based stream."""
    key = b"".join((value % 2**64).to_bytes(8, "little") for value in (seed, choice, position))
    word = int.from_bytes(blake2b(key, digest_size=8, person=b"kvmesh.draw").digest(), "little")
    return (word >> 11) * 2.0**-53


def _sample_row(logits: NDArray[np.float32], row: SampleRow) -> Sampled | SampleFailure:
    if not np.isfinite(logits).all():
        return SampleFailure("the model gave logits that are no numbers")
    params = row.params
    if params.greedy and params.plain and not row.banned and row.allowed is None:
        token = int(logits.argmax())
    else:
        bad = _outside(row, len(logits))
        if bad is not None:
            return SampleFailure(f"token id {bad} is outside the vocabulary of {len(logits)}")
        if row.allowed is not None and len(row.allowed) != len(logits):
            return SampleFailure(f"a grammar for {len(row.allowed)} tokens at {len(logits)} logits")
        scores = _adjusted(logits, row)
        token = int(scores.argmax())
        if scores[token] == -np.inf:
            return SampleFailure("every token is banned")
        if not params.greedy:
            token = _draw(scores, row)
    if params.logprobs is None:
        return Sampled(token)
    return _with_logprobs(token, logits, params.logprobs)


def _outside(row: SampleRow, vocab: int) -> int | None:
    for ids in (row.params.logit_bias, row.banned):
        for token in ids:
            if not 0 <= token < vocab:
                return token
    return None


def _adjusted(logits: NDArray[np.float32], row: SampleRow) -> Float64s:
    """Logits after bans, bias and penalties. [vocab]"""
    params = row.params
    scores = logits.astype(np.float64)
    if row.allowed is not None:
        scores[~row.allowed] = -np.inf
    if row.banned:
        banned = list(row.banned)
        kept = scores[banned]
        scores[banned] = -np.inf
        if row.allowed is not None and scores.max() == -np.inf:
            # The grammar is at its end: it can only stop, however early that is.
            scores[banned] = kept
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.repetition_penalty != 1.0 and len(row.context):
        seen = np.unique(np.asarray(row.context, dtype=np.int64))
        values = scores[seen]
        scores[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        output = np.asarray(row.context[row.prompt_len :], dtype=np.int64)
        seen, counts = np.unique(output, return_counts=True)
        scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _draw(scores: Float64s, row: SampleRow) -> int:
    """Temperature, top-k, top-p, min-p, then one draw from what is left."""
    params = row.params
    scaled = (scores - scores.max()) / params.temperature
    kept: Ids | None = None
    if 0 < params.top_k < len(scaled):
        # Ties with the k-th best stay in: which of them is left out would be arbitrary.
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        kept = np.flatnonzero(scaled >= threshold)
        scaled = scaled[kept]
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    if params.min_p > 0.0:
        # Weights are relative to the best token, which is what min-p asks about.
        likely = np.flatnonzero(weights >= params.min_p * weights.max())
        kept = likely if kept is None else kept[likely]
        weights = weights[likely]
    edges = np.cumsum(weights)
    point = uniform(params.seed, row.choice, row.position) * edges[-1]
    index = int(np.searchsorted(edges, point, side="right"))
    if index >= len(edges):  # the product rounded up to the last edge
        index = int(np.flatnonzero(weights)[-1])
    return index if kept is None else int(kept[index])


def _nucleus(weights: Float64s, top_p: float) -> Ids:
    """Indices, ascending, of the smallest set of largest weights that holds `top_p` of their sum.

    Sorts only as many of the largest as are needed: a whole vocabulary takes milliseconds.
    """
    wanted = top_p * weights.sum()
    count = min(256, len(weights))
    while True:
        whole = count == len(weights)
        best = np.arange(count) if whole else np.sort(np.argpartition(weights, -count)[-count:])
        # Stable: equal weights in the order of their ids.
        best = best[np.argsort(-weights[best], kind="stable")]
        reached = np.cumsum(weights[best])
        if reached[-1] >= wanted or whole:
            size = int(np.searchsorted(reached, wanted, side="left")) + 1
            return np.sort(best[:size])
        count = min(count * 8, len(weights))


def _with_logprobs(token: int, logits: NDArray[np.float32], count: int) -> Sampled:
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    top: tuple[tuple[int, float], ...] = ()
    count = min(count, len(scores))
    if count > 0:
        threshold = np.partition(scores, -count)[-count]
        best = np.flatnonzero(scores >= threshold)
        best = best[np.lexsort((best, -scores[best]))][:count]
        top = tuple((int(index), float(scores[index])) for index in best)
    return Sampled(token, float(scores[token]), top)
