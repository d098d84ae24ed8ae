"""`POST /v1/completions`: its fields, and the shape of its answers and chunks.

A prompt is a text, a list of texts, a list of token ids or a list of such lists;
choice i of prompt p has index p * n + i. `usage` carries the cached tokens although
the oldest models' recorded answers have no details: it is where a client sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesh.errors import InvalidRequest
from router.core.core import Admitted, Core
from router.core.limits import PROMPTS_MAX, check_count
from router.core.request import Ask, Delta, Token, Usage
from router.openai import parameters
from router.openai.fields import Fields, integer, wrong_type

OBJECT, ID_PREFIX = "text_completion", "cmpl-"
LOGPROBS_MAX = 5
MAX_TOKENS_DEFAULT = 16

Prompt = str | list[int]


class CompletionRequest:
    """A read request. Everything but the prompts' tokens is already in the words of the core."""

    names: Mapping[str, str] = {}

    def __init__(self, body: Mapping[str, Any]) -> None:
        fields = Fields(body)
        self.model = parameters.model_of(fields)
        self._fields = fields

    def read(self) -> None:
        """The rest, once the caller may use the model; raises InvalidRequest."""
        fields = self._fields
        self.prompts = _prompts(fields)
        self.n = parameters.choices_of(fields)
        self.stream, self.include_usage = parameters.streaming_of(fields)
        self.logprobs = _logprobs(fields)
        self.sampling = parameters.sampling_of(fields, self.logprobs)
        self.stopping = parameters.stopping_of(fields, fields.integer("max_tokens"))
        self.metadata = parameters.metadata_of(fields)
        parameters.accept_harmless(fields)
        _best_of(fields, self.n)
        fields.unsupported("echo", (False,))
        fields.unsupported("suffix", ("",))
        fields.end()

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Tokenises."""
        ids = await asyncio.gather(*[_ids(core, admitted, prompt) for prompt in self.prompts])
        stopping = self.stopping
        if stopping.max_tokens is None:
            room = admitted.model.text.context_length - max(map(len, ids))
            stopping = replace(stopping, max_tokens=max(1, min(MAX_TOKENS_DEFAULT, room)))
        return Ask(self.model, tuple(ids), self.n, self.sampling, stopping, self.metadata)

    def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **head,
            "object": OBJECT,
            "choices": [self._choice(choice, choice.finish) for choice in choices],
            "usage": usage_object(usage),
        }

    def chunk_head(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """What all chunks of a stream have in common."""
        return {**head, "object": OBJECT}

    def first(self, index: int) -> dict[str, Any] | None:
        """Completions have no opening chunk."""
        return None

    def content(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta shows; the last one carries the finish reason."""
        shows = delta.text or (self.logprobs is not None and delta.tokens) or delta.finish
        return self._choice(delta, delta.finish) if shows else None

    def finish(self, delta: Delta) -> dict[str, Any] | None:
        """It came with the last content."""
        return None

    def _choice(self, delta: Delta, finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None and delta.tokens:
            logprobs = _logprobs_object(delta.tokens, self.logprobs)
        return {"text": delta.text, "index": delta.index, "logprobs": logprobs, "finish_reason": finish}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Counts as completions show them: the legacy shape has details only when there is one to tell."""
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        shown["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens, "audio_tokens": 0}
    return shown


async def _ids(core: Core, admitted: Admitted, prompt: Prompt) -> list[int]:
    return prompt if isinstance(prompt, list) else await core.encode(admitted, prompt)


def _prompts(fields: Fields) -> list[Prompt]:
    raw = fields.required("prompt")
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list):
        raise wrong_type("prompt", "a string or an array", raw)
    if not raw:
        raise _empty("prompt")
    if isinstance(raw[0], (str, list)):
        check_count("prompt", len(raw), PROMPTS_MAX)
        return [_prompt(f"prompt[{place}]", item, type(raw[0])) for place, item in enumerate(raw)]
    return [_token_ids("prompt", raw)]


def _prompt(place: str, raw: Any, kind: type) -> Prompt:
    if not isinstance(raw, kind):
        raise wrong_type(place, "the same kind of prompt as the first", raw)
    if not isinstance(raw, list):
        return str(raw)
    if not raw:
        raise _empty(place)
    return _token_ids(place, raw)


def _token_ids(place: str, raw: list[Any]) -> list[int]:
    # Most prompts are right: one pass in C, and a slow one to name what is wrong.
    if set(map(type, raw)) == {int} and min(raw) >= 0:
        return raw
    for index, item in enumerate(raw):
        if integer(f"{place}[{index}]", item) < 0:
            raise InvalidRequest(
                f"Invalid '{place}[{index}]': token ids are not negative, but got {item}.",
                code="integer_below_min_value",
                param=place,
            )
    return raw


def _empty(place: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{place}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        code="empty_array",
        param=place,
    )


def _logprobs(fields: Fields) -> int | None:
    count = fields.integer("logprobs")
    if count is not None and not 0 <= count <= LOGPROBS_MAX:
        raise InvalidRequest(
            f"Invalid 'logprobs': expected an integer from 0 to {LOGPROBS_MAX}, but got {count} instead.",
            code="integer_below_min_value" if count < 0 else "integer_above_max_value",
            param="logprobs",
        )
    return count


def _best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of")
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise InvalidRequest(
            f"Invalid 'best_of': expected a value >= n ({n}), but got {best_of} instead.",
            code="invalid_value",
            param="best_of",
        )
    raise InvalidRequest(
        "Unsupported parameter: 'best_of' above n is not supported with this model.",
        code="unsupported_parameter",
        param="best_of",
    )


def _logprobs_object(tokens: Sequence[Token], alternatives: int) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if alternatives else None,
        "text_offset": [token.text_offset for token in tokens],
    }


def _top(token: Token) -> dict[str, float]:
    """The alternatives by text, best first, and the token itself if it is not one of them."""
    top = {other.text: other.logprob for other in reversed(token.top)}
    ordered = dict(sorted(top.items(), key=lambda item: -item[1]))
    if token.logprob is not None:
        ordered.setdefault(token.text, token.logprob)
    return ordered
