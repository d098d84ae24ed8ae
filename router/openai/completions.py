"""`POST /v1/completions`: its fields, and the shape of its answers and chunks.

A prompt is a text, a list of texts, a list of token ids or a list of such lists;
choice i of prompt p has index p * n + i. `usage` carries the cached tokens although
the oldest models' recorded answers have no details: it is where a client sees them.

`echo` says the prompt again before each answer, with `logprobs` also how likely its tokens
were; with it `max_tokens` may be 0, and nothing is added. `best_of` generates so many
choices and shows the `n` whose tokens were likeliest on average. `suffix` is for models
that can fill in the middle.
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
from router.openai.chunks import ChunkEvents
from router.openai.echo import Echo
from router.openai.fields import Fields, empty_array, integer, wrong_type
from router.openai.structured import structured_of

OBJECT, ID_PREFIX = "text_completion", "cmpl-"
LOGPROBS_MAX = 5
MAX_TOKENS_DEFAULT = 16
BEST_OF_MAX = 20

Prompt = str | list[int]


class CompletionRequest:
    """A read request. Everything but the prompts' tokens is already in the words of the core."""

    names: Mapping[str, str] = {"prompt_logprobs": "logprobs"}

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._echoes: list[Echo] = []
        self._begun: set[int] = set()
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
        self.best_of = _best_of(fields, self.n, stream=self.stream)
        # The best are chosen by what their tokens' log-probabilities are.
        chosen = 0 if self.best_of > self.n and self.logprobs is None else self.logprobs
        self.sampling = parameters.sampling_of(fields, chosen)
        self.suffix = fields.string("suffix") or ""
        self.echo = _echo(fields, self.suffix)
        max_tokens = fields.integer("max_tokens")
        if max_tokens is not None and max_tokens < 0:
            raise InvalidRequest(
                "Invalid 'max_tokens': integer below minimum value. "
                f"Expected a value >= 0, but got {max_tokens} instead.",
                code="integer_below_min_value",
                param="max_tokens",
            )
        # One token is generated all the same, and not shown.
        self.only_prompt = self.echo and max_tokens == 0
        self.stopping = parameters.stopping_of(fields, 1 if self.only_prompt else max_tokens)
        self.structured = structured_of(fields)
        self.metadata = parameters.metadata_of(fields)
        parameters.accept_harmless(fields)
        if self.best_of > self.n:
            self.names = {**self.names, "n": "best_of"}
        fields.end()

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Tokenises."""
        ids = await asyncio.gather(*[self._ids(core, admitted, prompt) for prompt in self.prompts])
        stopping = self.stopping
        if stopping.max_tokens is None:
            room = admitted.model.text.context_length - max(map(len, ids))
            stopping = replace(stopping, max_tokens=max(1, min(MAX_TOKENS_DEFAULT, room)))
        if self.echo:
            _check_known(ids, admitted.model.known_ids)
            tokenizer = admitted.model.text.tokenizer
            self._echoes = [Echo(tokenizer, *pair) for pair in zip(self.prompts, ids, strict=True)]
        return Ask(
            self.model,
            tuple(ids),
            self.best_of,
            self.sampling,
            stopping,
            self.metadata,
            prompt_logprobs=self.logprobs if self.echo else None,
            grammar=await core.grammar(admitted, None, self.structured),
        )

    async def _ids(self, core: Core, admitted: Admitted, prompt: Prompt) -> list[int]:
        if self.suffix:
            return await core.encode_infill(admitted, prompt, self.suffix)
        return prompt if isinstance(prompt, list) else await core.encode(admitted, prompt)

    async def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self.chunk_head(head),
            **self.chunk_tail(head),
            "choices": [self._choice(choice, choice.finish) for choice in self._best(choices)],
            "usage": self.usage(usage),
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Counts as this request's answer shows them."""
        return usage_object(replace(usage, completion_tokens=0) if self.only_prompt else usage)

    def _best(self, choices: Sequence[Delta]) -> list[Delta]:
        """Of each prompt's choices the `n` whose tokens were likeliest on average, best first."""
        if self.best_of == self.n:
            return list(choices)
        best: list[Delta] = []
        for first in range(0, len(choices), self.best_of):
            ranked = sorted(choices[first : first + self.best_of], key=_mean_logprob, reverse=True)
            best += [replace(choice, index=len(best) + i) for i, choice in enumerate(ranked[: self.n])]
        return best

    def events(self, head: Mapping[str, Any]) -> ChunkEvents:
        """Those of a stream."""
        return ChunkEvents(self, head)

    def chunk_head(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """What stands in every chunk before its choices."""
        return {"id": head["id"], "object": OBJECT, "created": head["created"]}

    def chunk_tail(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """What stands behind them."""
        return {"model": head["model"]}

    def first(self, index: int) -> dict[str, Any] | None:
        """Completions have no opening chunk."""
        return None

    def content(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta shows; the last one carries the finish reason."""
        begins = self.echo and delta.index not in self._begun
        shows = delta.text or (self.logprobs is not None and delta.tokens) or delta.finish or begins
        return [self._choice(delta, delta.finish)] if shows else []

    def finish(self, delta: Delta) -> dict[str, Any] | None:
        """It came with the last content."""
        return None

    def _choice(self, delta: Delta, finish: str | None) -> dict[str, Any]:
        text, tokens = ("", []) if self.only_prompt else (delta.text, delta.tokens)
        if self.echo:
            text, tokens = self._echoed(delta, text, tokens)
        shown = self.logprobs is not None and tokens
        logprobs = _logprobs_object(tokens) if shown else None
        finish = "length" if finish and self.only_prompt else finish
        return {"text": text, "index": delta.index, "logprobs": logprobs, "finish_reason": finish}

    def _echoed(self, delta: Delta, text: str, tokens: list[Token]) -> tuple[str, list[Token]]:
        """With the prompt in front, where the choice begins here."""
        echo = self._echoes[delta.index // self.n]
        moved = [replace(token, text_offset=token.text_offset + len(echo.text)) for token in tokens]
        if delta.index in self._begun:
            return text, moved
        self._begun.add(delta.index)
        if self.logprobs is None:
            return echo.text + text, moved
        return echo.text + text, [*echo.tokens(delta.prompt or ()), *moved]


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


def _check_known(prompts: Sequence[list[int]], known_ids: int) -> None:
    """An echo has to name every token; the core refuses the others as well, later."""
    for ids in prompts:
        if any(token >= known_ids for token in ids):
            raise InvalidRequest(
                f"Invalid 'prompt': a token id is outside the vocabulary of {known_ids}.",
                code="invalid_value",
                param="prompt",
            )


def _echo(fields: Fields, suffix: str) -> bool:
    echo = fields.boolean("echo")
    if echo and suffix:
        raise InvalidRequest(
            "Invalid 'echo': it cannot be used together with 'suffix'.", code="invalid_value", param="echo"
        )
    return echo


def _mean_logprob(choice: Delta) -> float:
    return sum(token.logprob or 0.0 for token in choice.tokens) / max(1, len(choice.tokens))


def _prompts(fields: Fields) -> list[Prompt]:
    raw = fields.required("prompt")
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list):
        raise wrong_type("prompt", "a string or an array", raw)
    if not raw:
        raise empty_array("prompt")
    if isinstance(raw[0], (str, list)):
        check_count("prompt", len(raw), PROMPTS_MAX)
        return [_prompt(f"prompt[{place}]", item, type(raw[0])) for place, item in enumerate(raw)]
    return [token_ids("prompt", raw)]


def _prompt(place: str, raw: Any, kind: type) -> Prompt:
    if not isinstance(raw, kind):
        raise wrong_type(place, "the same kind of prompt as the first", raw)
    if not isinstance(raw, list):
        return str(raw)
    if not raw:
        raise empty_array(place)
    return token_ids(place, raw)


def token_ids(place: str, raw: list[Any]) -> list[int]:
    """Token ids as they stand in JSON; raises InvalidRequest."""
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


def _logprobs(fields: Fields) -> int | None:
    count = fields.integer("logprobs")
    if count is not None and not 0 <= count <= LOGPROBS_MAX:
        raise InvalidRequest(
            f"Invalid 'logprobs': expected an integer from 0 to {LOGPROBS_MAX}, but got {count} instead.",
            code="integer_below_min_value" if count < 0 else "integer_above_max_value",
            param="logprobs",
        )
    return count


def _best_of(fields: Fields, n: int, *, stream: bool) -> int:
    """How many choices of each prompt are generated."""
    best_of = fields.integer("best_of")
    if best_of is None:
        return n
    if best_of < n or best_of > BEST_OF_MAX:
        raise InvalidRequest(
            f"Invalid 'best_of': expected a value from n ({n}) to {BEST_OF_MAX}, but got {best_of} instead.",
            code="invalid_value",
            param="best_of",
        )
    if stream and best_of > n:
        raise InvalidRequest(
            "Invalid 'best_of': which choices are the best is known at their end; it cannot be streamed.",
            code="invalid_value",
            param="best_of",
        )
    return best_of


def _logprobs_object(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _top(token: Token) -> dict[str, float] | None:
    """The alternatives by text, best first, and the token itself if it is not one of them.

    None for the first token of a prompt, which nothing comes before.
    """
    if token.logprob is None:
        return None
    top = {other.text: other.logprob for other in reversed(token.top)}
    ordered = dict(sorted(top.items(), key=lambda item: -item[1]))
    ordered.setdefault(token.text, token.logprob)
    return ordered
