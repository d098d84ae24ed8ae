"""`POST /v1/chat/completions`: its fields, and the shape of its answers and chunks.

Shapes are those of recorded answers of the real service: what is null there is null
here, what is absent there is absent here. Chunks go role, content, finish per choice,
then usage if it was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesh.errors import InvalidRequest
from router.core.core import Admitted, Core
from router.core.limits import LOGPROBS_MAX
from router.core.request import Ask, Delta, Token, Usage
from router.openai import parameters
from router.openai.fields import Fields, wrong_type

OBJECT, CHUNK_OBJECT, ID_PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl-"
ROLES = frozenset({"system", "developer", "user", "assistant"})
MESSAGES_MAX = 16_384


class ChatRequest:
    """A read request. Everything but the messages is already in the words of the core."""

    names: Mapping[str, str] = {"logprobs": "top_logprobs", "prompt": "messages"}

    def __init__(self, body: Mapping[str, Any]) -> None:
        fields = Fields(body)
        self.model = parameters.model_of(fields)
        self._fields = fields

    def read(self) -> None:
        """The rest, once the caller may use the model; raises InvalidRequest."""
        fields = self._fields
        self.messages = read_messages(fields)
        self.n = parameters.choices_of(fields)
        self.stream, self.include_usage = parameters.streaming_of(fields)
        self.logprobs = _logprobs(fields)
        self.sampling = parameters.sampling_of(fields, self.logprobs)
        self.max_tokens = fields.integer("max_tokens")
        name = "max_tokens"
        if fields.has("max_completion_tokens"):
            self.max_tokens = fields.integer("max_completion_tokens")
            name = "max_completion_tokens"
        self.names = {**self.names, "max_tokens": name}
        self.stopping = parameters.stopping_of(fields, self.max_tokens)
        self.metadata = parameters.metadata_of(fields)
        parameters.accept_harmless(fields)
        _refuse_unserved(fields)
        fields.end()

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Renders and tokenises."""
        ids = await core.encode_chat(admitted, self.messages)
        return Ask(self.model, (ids,), self.n, self.sampling, self.stopping, self.metadata)

    def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **head,
            "object": OBJECT,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage_object(usage),
            "service_tier": "default",
            "system_fingerprint": None,
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Counts as this request's answer shows them."""
        return usage_object(usage)

    def _choice(self, choice: Delta) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
            "finish_reason": choice.finish,
        }
        if self.logprobs is not None:
            answer["logprobs"] = _logprobs_object(choice.tokens)
        return answer

    def chunk_head(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """What all chunks of a stream have in common."""
        return {**head, "object": CHUNK_OBJECT, "service_tier": "default", "system_fingerprint": None}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, ())

    def content(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta shows; None if it is nothing."""
        if not delta.text and not (self.logprobs is not None and delta.tokens):
            return None
        return self._chunk(delta.index, {"content": delta.text}, None, delta.tokens)

    def finish(self, delta: Delta) -> dict[str, Any] | None:
        """The last chunk of a choice."""
        return self._chunk(delta.index, {}, delta.finish, ())

    def _chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None, tokens: Sequence[Token]
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {"index": index, "delta": delta}
        if self.logprobs is not None:
            chunk["logprobs"] = _logprobs_object(tokens) if tokens else None
        return {**chunk, "finish_reason": finish}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Counts as chat answers show them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, for the template; raises InvalidRequest."""
    raw = fields.required("messages")
    if not isinstance(raw, list):
        raise wrong_type("messages", "an array of messages", raw)
    if not raw:
        raise InvalidRequest(
            "Invalid 'messages': empty array. Expected an array with minimum length 1, "
            "but got an empty array instead.",
            code="empty_array",
            param="messages",
        )
    if len(raw) > MESSAGES_MAX:
        raise InvalidRequest(
            f"Invalid 'messages': expected at most {MESSAGES_MAX}.",
            code="array_above_max_length",
            param="messages",
        )
    return [_message(place, message) for place, message in enumerate(raw)]


def _message(place: int, raw: Any) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    role = fields.required("role")
    if role in ("tool", "function"):
        raise InvalidRequest(
            f"Unsupported value: '{where}.role' does not support '{role}' with this model.",
            code="unsupported_value",
            param=f"{where}.role",
        )
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"Invalid value: '{where}.role'. Supported values are: {', '.join(sorted(ROLES))}.",
            code="invalid_value",
            param=f"{where}.role",
        )
    message: dict[str, Any] = {"role": role, "content": _content(fields)}
    name = fields.string("name")
    if name is not None:
        message["name"] = name
    for unserved in ("tool_calls", "function_call", "audio"):
        fields.unsupported(unserved, ([],))
    # What an assistant's message of an earlier answer carries.
    fields.ignored("refusal", "annotations")
    fields.end()
    return message


def _content(fields: Fields) -> str:
    """Text, or text parts joined as the templates' own tools join them."""
    place = fields.place("content")
    raw = fields.take("content")
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise wrong_type(place, "a string or an array of text parts", raw)
    if not raw:
        raise InvalidRequest(
            f"Invalid '{place}': empty array. Expected an array with minimum length 1, "
            "but got an empty array instead.",
            code="empty_array",
            param=place,
        )
    return "\n".join(_part(f"{place}[{index}]", part) for index, part in enumerate(raw))


def _part(place: str, raw: Any) -> str:
    if not isinstance(raw, dict):
        raise wrong_type(place, "an object", raw)
    fields = Fields(raw, place)
    kind = fields.required("type")
    if kind not in ("text", "refusal"):
        shown = kind if isinstance(kind, str) else "?"
        raise InvalidRequest(
            f"Unsupported value: '{place}.type' does not support '{shown[:32]}' with this model.",
            code="unsupported_value",
            param=f"{place}.type",
        )
    text = fields.required(kind)
    if not isinstance(text, str):
        raise wrong_type(f"{place}.{kind}", "a string", text)
    fields.ignored("prompt_cache_breakpoint")
    fields.end()
    return text


def _logprobs(fields: Fields) -> int | None:
    """Alternatives per position; None for no log-probabilities."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not 0 <= top <= LOGPROBS_MAX:
        bound = (
            "below minimum value. Expected a value >= 0"
            if top < 0
            else (f"above maximum value. Expected a value <= {LOGPROBS_MAX}")
        )
        raise InvalidRequest(
            f"Invalid 'top_logprobs': integer {bound}, but got {top} instead.",
            code="integer_below_min_value" if top < 0 else "integer_above_max_value",
            param="top_logprobs",
        )
    if not wanted:
        raise InvalidRequest(
            "Invalid 'top_logprobs': 'logprobs' must be true when it is set.",
            code="invalid_value",
            param="top_logprobs",
        )
    return top


def _refuse_unserved(fields: Fields) -> None:
    fields.unsupported("tools", ([],))
    fields.unsupported("tool_choice", ("none", "auto"))
    fields.unsupported("functions", ([],))
    fields.unsupported("function_call", ("none", "auto"))
    fields.unsupported("response_format", ({"type": "text"},))
    fields.unsupported("modalities", (["text"],))
    fields.unsupported("reasoning_effort", ("none",))
    for name in ("audio", "prediction", "web_search_options", "verbosity", "moderation"):
        fields.unsupported(name)


def _logprobs_object(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.raw) or None,
                "top_logprobs": [
                    {"token": top.text, "logprob": top.logprob, "bytes": list(top.raw) or None}
                    for top in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }
