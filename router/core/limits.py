"""Every bound on a request, checked before any worker sees it.

Both faces pass through here, so a bound holds whoever asks. A face may name the
fields in its own words (`names`), so that the error points at what the client
wrote. This module does not know how the fields were spelled on the wire.

| field | bound |
|---|---|
| prompt | at least one token; every id in the vocabulary; shorter than the context |
| prompts | 1 to 128 in one request, prompts x n at most 1,024 |
| n | 1 to 128 |
| temperature | 0 to 2; below 1e-5 is greedy |
| top_p | 0 to 1 without 0; top_k 0 (off) or more; min_p 0 to 1 |
| repetition_penalty | above 0, at most 100; presence and frequency -2 to 2 |
| logit_bias | at most 300 ids of the vocabulary, -100 to 100 |
| seed | any signed or unsigned 64-bit number; a negative one counts modulo 2^64 |
| logprobs, prompt_logprobs | 0 to 20 alternatives |
| max_tokens | at least 1; with the prompt not more than the context |
| min_tokens | 0 to max_tokens |
| stop | at most 4 strings of 1 to 1,024 characters |
| stop_token_ids | at most 64 ids of the vocabulary |
| metadata | at most 16 pairs, keys up to 64 and values up to 512 characters |
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesh.errors import InvalidRequest
from router.core.request import NOTHING, Ask, Sampling, Stopping

PROMPTS_MAX = 128
N_MAX = 128
CHOICES_MAX = 1024
GREEDY_BELOW = 1e-5
LOGIT_BIAS_MAX = 300
LOGPROBS_MAX = 20
STOP_MAX = 4
STOP_LENGTH_MAX = 1024
STOP_IDS_MAX = 64
METADATA_MAX = 16
SEQUENCES_MAX = 2048
SEQUENCES_TOKENS_MAX = 300_000
METADATA_KEY_MAX = 64
METADATA_VALUE_MAX = 512


def checked(ask: Ask, *, vocab_size: int, context_length: int, names: Mapping[str, str] = NOTHING) -> Ask:
    """`ask` with its defaults filled in, or InvalidRequest that names the field.

    The result always has a seed (0 .. 2^64 - 1) and max_tokens.
    """
    check = _Check(names)
    check.integer("n", ask.n, 1, N_MAX)
    longest = _prompts(check, ask.prompts, ask.n, vocab_size, context_length)
    sampling = _sampling(check, ask.sampling, vocab_size)
    stopping = _stopping(check, ask.stopping, vocab_size, longest, context_length)
    _metadata(check, ask.metadata)
    if ask.prompt_logprobs is not None:
        check.integer("prompt_logprobs", ask.prompt_logprobs, 0, min(LOGPROBS_MAX, vocab_size))
    return replace(ask, sampling=sampling, stopping=stopping)


class _Check:
    """Bounds with OpenAI's words for breaking them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def refuse(self, field: str, reason: str, code: str = "invalid_value") -> InvalidRequest:
        name = self._names.get(field, field)
        return InvalidRequest(f"Invalid '{name}': {reason}", code=code, param=name)

    def integer(self, field: str, value: int, low: int, high: int) -> None:
        if value < low:
            raise self.refuse(
                field,
                f"integer below minimum value. Expected a value >= {low}, but got {value} instead.",
                "integer_below_min_value",
            )
        if value > high:
            raise self.refuse(
                field,
                f"integer above maximum value. Expected a value <= {high}, but got {value} instead.",
                "integer_above_max_value",
            )

    def number(self, field: str, value: float, low: float, high: float) -> None:
        if not math.isfinite(value):
            raise self.refuse(field, "expected a finite number.")
        if value < low:
            raise self.refuse(
                field,
                f"decimal below minimum value. Expected a value >= {low:g}, but got {value:g} instead.",
                "decimal_below_min_value",
            )
        if value > high:
            raise self.refuse(
                field,
                f"decimal above maximum value. Expected a value <= {high:g}, but got {value:g} instead.",
                "decimal_above_max_value",
            )

    def count(self, field: str, count: int, most: int) -> None:
        check_count(self._names.get(field, field), count, most)

    def ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise self.refuse(
                field,
                f"token id {bad} is outside the vocabulary. Expected ids from 0 to {vocab_size - 1}.",
            )


def _prompts(
    check: _Check, prompts: tuple[list[int], ...], n: int, vocab_size: int, context_length: int
) -> int:
    """The length of the longest prompt."""
    if not prompts:
        raise check.refuse("prompt", "expected at least one prompt.", "empty_array")
    check.count("prompt", len(prompts), PROMPTS_MAX)
    if len(prompts) * n > CHOICES_MAX:
        raise check.refuse(
            "n", f"{len(prompts)} prompts with n = {n} are more than {CHOICES_MAX} choices in one request."
        )
    for ids in prompts:
        if not ids:
            raise check.refuse("prompt", "the prompt has no tokens. Expected at least one token.")
        check.ids("prompt", ids, vocab_size)
    longest = max(map(len, prompts))
    if longest >= context_length:
        raise check_context(longest, None, context_length, check.refuse("prompt", "").param)
    return longest


def check_sequences(sequences: Sequence[Sequence[int]], *, known_ids: int, most: int, param: str) -> None:
    """The bounds of what is to be encoded: 1 to 2,048 sequences, each 1 to `most` tokens, 300,000 in all."""
    check_count(param, len(sequences), SEQUENCES_MAX)
    for place, ids in enumerate(sequences):
        where = param if len(sequences) == 1 else f"{param}[{place}]"
        if not ids:
            raise InvalidRequest(f"Invalid '{where}': it is empty.", code="invalid_value", param=where)
        if len(ids) > most:
            raise check_context(len(ids), None, most, where)
        if min(ids) < 0 or max(ids) >= known_ids:
            raise InvalidRequest(
                f"Invalid '{where}': a token id is outside the vocabulary of {known_ids}.",
                code="invalid_value",
                param=where,
            )
    if sum(map(len, sequences)) > SEQUENCES_TOKENS_MAX:
        raise InvalidRequest(
            f"Invalid '{param}': more than {SEQUENCES_TOKENS_MAX} tokens in one request.",
            code="max_tokens_per_request",
            param=param,
        )


def check_count(param: str, count: int, most: int) -> None:
    """Refuses a list that is longer than `most`."""
    if count > most:
        raise InvalidRequest(
            f"Invalid '{param}': array too long. Expected an array with maximum length {most}, "
            f"but got an array with length {count} instead.",
            code="array_above_max_length",
            param=param,
        )


def check_context(prompt: int, completion: int | None, limit: int, param: str | None) -> InvalidRequest:
    """The error for a request that does not fit into the context of the model."""
    asked = f"your prompt has {prompt} tokens"
    if completion is not None:
        asked = (
            f"you asked for {prompt + completion} tokens ({prompt} in the prompt, {completion} to generate)"
        )
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens, but {asked}. Please reduce the length.",
        code="context_length_exceeded",
        param=param,
    )


def _sampling(check: _Check, sampling: Sampling, vocab_size: int) -> Sampling:
    check.number("temperature", sampling.temperature, 0.0, 2.0)
    check.number("top_p", sampling.top_p, 0.0, 1.0)
    check.integer("top_k", sampling.top_k, 0, 2**31 - 1)
    check.number("min_p", sampling.min_p, 0.0, 1.0)
    check.number("repetition_penalty", sampling.repetition_penalty, 0.0, 100.0)
    if sampling.repetition_penalty == 0.0:
        raise check.refuse("repetition_penalty", "expected a value above 0.", "decimal_below_min_value")
    check.number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    check.number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.logprobs is not None:
        check.integer("logprobs", sampling.logprobs, 0, min(LOGPROBS_MAX, vocab_size))
    if len(sampling.logit_bias) > LOGIT_BIAS_MAX:
        raise check.refuse(
            "logit_bias", f"expected at most {LOGIT_BIAS_MAX} ids, but got {len(sampling.logit_bias)}."
        )
    check.ids("logit_bias", list(sampling.logit_bias), vocab_size)
    for bias in sampling.logit_bias.values():
        check.number("logit_bias", bias, -100.0, 100.0)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    check.integer("seed", seed, -(2**63), 2**64 - 1)
    # Of no probability at all there is still the likeliest token.
    greedy = sampling.temperature < GREEDY_BELOW or sampling.top_p == 0.0
    return replace(
        sampling,
        temperature=0.0 if greedy else sampling.temperature,
        top_p=sampling.top_p or 1.0,
        # More than the vocabulary is the same as off.
        top_k=0 if sampling.top_k >= vocab_size else sampling.top_k,
        seed=seed % 2**64,
    )


def _stopping(
    check: _Check, stopping: Stopping, vocab_size: int, longest: int, context_length: int
) -> Stopping:
    room = context_length - longest
    max_tokens = room if stopping.max_tokens is None else stopping.max_tokens
    check.integer("max_tokens", max_tokens, 1, 2**31 - 1)
    if max_tokens > room:
        param = check.refuse("max_tokens", "").param
        raise check_context(longest, max_tokens, context_length, param)
    check.integer("min_tokens", stopping.min_tokens, 0, 2**31 - 1)
    if stopping.min_tokens > max_tokens:
        raise check.refuse("min_tokens", f"expected at most max_tokens ({max_tokens}).")
    check.count("stop", len(stopping.stop), STOP_MAX)
    for stop in stopping.stop:
        if not 1 <= len(stop) <= STOP_LENGTH_MAX:
            raise check.refuse(
                "stop", f"expected strings of 1 to {STOP_LENGTH_MAX} characters, but got one of {len(stop)}."
            )
    check.count("stop_token_ids", len(stopping.stop_token_ids), STOP_IDS_MAX)
    check.ids("stop_token_ids", stopping.stop_token_ids, vocab_size)
    return replace(stopping, max_tokens=max_tokens)


def _metadata(check: _Check, metadata: Mapping[str, str]) -> None:
    if len(metadata) > METADATA_MAX:
        raise check.refuse("metadata", f"expected at most {METADATA_MAX} pairs, but got {len(metadata)}.")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX:
            raise check.refuse(
                "metadata",
                f"keys have at most {METADATA_KEY_MAX} characters and values at most {METADATA_VALUE_MAX}.",
            )
