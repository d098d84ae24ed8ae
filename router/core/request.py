"""What a request is, once a face has understood it.

Plain data in the words of the core. It knows neither JSON nor protobuf, nor
which face asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from text.answer_parser import AnswerForm
from text.parts import Part, joined

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the identity token says. `models` is the credential's own limit; None is no limit."""

    organisation: str
    project: str
    principal: str
    credential: str
    models: frozenset[str] | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are neutral.

    `logprobs` is the number of alternatives per position; None asks for no
    log-probabilities at all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a generation ends. `max_tokens` None is as far as the context allows."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders.

    `tools` are `{"type": "function", "function": {…}}`; `variables` are further names for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    calls_max: int | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its ids, and how the answer to it is to be taken apart (None: it is text)."""

    ids: list[int]
    form: AnswerForm | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `n` continuations of each prompt. Choice i of prompt p has index p * n + i.

    `prompt_logprobs` is the number of alternatives per prompt token where prompts are scored,
    None where they are not. A scored prompt finds nothing in the caches and leaves nothing there.
    With a `form` deltas carry `parts`. `grammar` is what answers must obey (`text.grammar.forms`).
    """

    model: str
    prompts: tuple[list[int], ...]
    n: int = 1
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    metadata: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    prompt_logprobs: int | None = None
    form: AnswerForm | None = None
    grammar: str = ""


# Of one position: the token's log-probability, and alternatives (id, log-probability), best first.
Scored = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class TopToken:
    """One alternative of a position."""

    id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `text_offset` counts characters of the choice's text before it.

    `logprob` is None unless log-probabilities were asked for; `raw` is empty for
    a control token.
    """

    id: int
    text: str = ""
    raw: bytes = b""
    logprob: float | None = None
    top: tuple[TopToken, ...] = ()
    text_offset: int = 0


@dataclass(slots=True)
class Delta:
    """What has become visible of one choice since the last delta.

    `finish` is "stop" or "length" on the last delta of the choice. A delta may
    have tokens and no text (a stop string may be beginning). `prompt` is on the first delta
    of a choice whose prompt is scored: one entry per prompt token after the first. `stop` is
    the stop string that ended the choice. `parts` is the text taken apart, if the request
    asked for that; `calls` counts the tool calls that have begun in the choice so far.
    """

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    prompt: tuple[Scored, ...] | None = None
    stop: str | None = None
    parts: list[Part] = field(default_factory=list)
    calls: int = 0
    reasoning_tokens: int = 0

    def add(self, more: Delta) -> None:
        """What has become visible after this, of the same choice."""
        self.text += more.text
        self.tokens += more.tokens
        self.finish = more.finish or self.finish
        self.prompt = more.prompt or self.prompt
        self.stop = more.stop or self.stop
        joined(self.parts, more.parts)
        self.calls = more.calls
        self.reasoning_tokens += more.reasoning_tokens


@dataclass(slots=True)
class Usage:
    """Counts over all prompts and choices of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
