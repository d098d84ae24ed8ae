"""What a router asks for, and the rules a request must satisfy to be taken at all.

Pure: knows neither gRPC nor torch. Every refusal names the field at fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.sampling import SamplingParams
from mesh.blocks import ID_BYTES, chain
from mesh.errors import InvalidRequest

LOGPROBS_LIMIT = 20
# Far above what any router asks for, and far below what a row can name.
CHOICES_LIMIT = 1 << 16
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class Opening:
    """One request as it arrives.

    `tokens` is the prompt, whose last `generated` tokens an earlier worker made;
    `max_tokens` counts those as well. `credit` is the number of tokens that may be
    sent per choice before more credit comes; None is no limit. `prompt_logprobs` is the
    number of alternatives per prompt token where the prompt is scored, None where it is not.
    `grammar` is what the answer must obey (`text.grammar.forms`), "" for nothing.
    """

    request_id: str
    handoff_id: str
    attempt: int
    capability: str
    tokens: tuple[int, ...]
    generated: int
    block_ids: tuple[bytes, ...]
    root_id: bytes
    n: int
    first_choice: int
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    arrival_unix_ns: int
    metadata: Mapping[str, str]
    credit: int | None
    traceparent: str = ""
    prompt_logprobs: int | None = None
    grammar: str = ""

    @property
    def prefix_blocks(self) -> int:
        """Whole blocks before the tail."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this worker can hold. `max_seqs` counts choices; `step_tokens` rows of one step."""

    page_tokens: int
    pages: int
    context_length: int
    vocab_size: int
    max_seqs: int
    step_tokens: int


def extra_pages(opening: Opening, page_tokens: int) -> int:
    """Pages beside the prefix that the request needs at once: the tail, copies of it, first growth.

    The tail takes one page. With n choices each other one needs a page of its own
    (a copy of the unfinished one), and if the answer can outgrow the tail's page
    one page of growth is set aside for the first.
    """
    length = len(opening.tokens)
    # The last token that is generated is never computed, so it needs no room.
    longest = length + opening.max_tokens - opening.generated - 1
    grows = -(-longest // page_tokens) > opening.prefix_blocks + 1
    return 1 + (opening.n - 1) + (1 if grows else 0)


def check(opening: Opening, limits: Limits) -> None:
    """Raises InvalidRequest for a request that no state of this worker could serve."""
    _check_prompt(opening, limits)
    _check_blocks(opening, limits)
    if opening.n < 1 or opening.n > limits.max_seqs:
        raise InvalidRequest(
            f"n is {opening.n}; this worker runs 1 to {limits.max_seqs} sequences", param="n"
        )
    if opening.first_choice + opening.n > CHOICES_LIMIT:
        raise InvalidRequest(f"a choice above {CHOICES_LIMIT}", param="first_choice")
    if opening.generated and opening.n != 1:
        raise InvalidRequest("a continuation has one choice", param="n")
    if not 0 <= opening.generated < len(opening.tokens):
        raise InvalidRequest("more tokens generated than the prompt has", param="generated")
    if opening.max_tokens <= opening.generated:
        raise InvalidRequest(
            f"max_tokens is {opening.max_tokens} and {opening.generated} are generated already",
            param="max_tokens",
        )
    if opening.prompt_logprobs is not None and opening.generated:
        raise InvalidRequest("a continuation is not scored again", param="prompt_logprobs")
    if (opening.prompt_logprobs or 0) > LOGPROBS_LIMIT:
        raise InvalidRequest(
            f"at most {LOGPROBS_LIMIT} log-probabilities per position", param="prompt_logprobs"
        )
    _check_sampling(opening.sampling, limits.vocab_size)
    if any(not 0 <= token < limits.vocab_size for token in opening.stop_ids):
        raise InvalidRequest(f"a stop token id is not below {limits.vocab_size}", param="stop_token_ids")


def check_chain(opening: Opening, page_tokens: int) -> None:
    """Raises InvalidRequest unless the block ids are those of the prompt.

    A page under the wrong id would be a wrong answer for whoever finds it later.
    """
    whole = opening.tokens[: opening.prefix_blocks * page_tokens]
    if tuple(chain(opening.root_id, whole, page_tokens)) != opening.block_ids:
        raise InvalidRequest("the block ids are not those of the prompt", param="block_ids")


def _check_prompt(opening: Opening, limits: Limits) -> None:
    length = len(opening.tokens)
    if length == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if min(opening.tokens) < 0 or max(opening.tokens) >= limits.vocab_size:
        raise InvalidRequest(f"a token id is not below {limits.vocab_size}", param="prompt")
    if length >= limits.context_length:
        raise InvalidRequest(
            f"the prompt has {length} tokens and the model reads {limits.context_length},"
            " with room for one more needed",
            code="context_length_exceeded",
            param="prompt",
        )
    least = opening.prefix_blocks + extra_pages(opening, limits.page_tokens)
    if least > limits.pages:
        raise InvalidRequest(
            f"the request needs at least {least} KV pages and the pool has {limits.pages}",
            code="pool_too_small",
            param="prompt",
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """A number that is none would draw any token, with no sign that something is wrong."""
    if (sampling.logprobs or 0) > LOGPROBS_LIMIT:
        raise InvalidRequest(f"at most {LOGPROBS_LIMIT} log-probabilities per position", param="logprobs")
    for name in _NUMBERS:
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequest(f"{name} is no number", param=name)
    if sampling.temperature < 0:
        raise InvalidRequest("the temperature is below 0", param="temperature")
    if sampling.repetition_penalty <= 0:
        raise InvalidRequest("the repetition penalty is not above 0", param="repetition_penalty")
    if any(token not in range(vocab_size) or math.isnan(v) for token, v in sampling.logit_bias.items()):
        raise InvalidRequest(
            f"a biased token id is not below {vocab_size}, or its bias is no number", param="logit_bias"
        )


def _check_blocks(opening: Opening, limits: Limits) -> None:
    expected = (len(opening.tokens) - 1) // limits.page_tokens
    if opening.prefix_blocks != expected:
        raise InvalidRequest(
            f"{opening.prefix_blocks} block ids for {expected} whole blocks before the tail",
            param="block_ids",
        )
    if any(len(item) != ID_BYTES for item in (*opening.block_ids, opening.root_id)):
        raise InvalidRequest(f"a block id has {ID_BYTES} bytes", param="block_ids")
