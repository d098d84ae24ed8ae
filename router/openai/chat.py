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
from router.core.request import Ask, Conversation, Delta, Token, Usage
from router.openai import parameters
from router.openai.chunks import ChunkEvents
from router.openai.fields import Fields
from router.openai.messages import read_messages
from router.openai.reasoning import effort_of, template_variables_of, variables
from router.openai.structured import structured_of
from router.openai.tools import tools_of
from text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart

OBJECT, CHUNK_OBJECT, ID_PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl-"


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
        self.tools = tools_of(fields)
        self.structured = structured_of(fields)
        self.effort = effort_of(fields)
        self.variables = template_variables_of(fields)
        self.metadata = parameters.metadata_of(fields)
        parameters.accept_harmless(fields)
        _refuse_unserved(fields)
        fields.end()

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Renders and tokenises."""
        tools = [tool.shown() for tool in self.tools.tools]
        conversation = Conversation(
            self.messages,
            tools,
            variables(admitted.model.text, self.effort, self.variables),
            calls_max=None if self.tools.parallel else 1,
        )
        prompt = await core.prompt_chat(admitted, conversation)
        calls = self.tools.output(structured=self.structured is not None)
        self._taken_apart = prompt.form is not None
        return Ask(
            self.model,
            (prompt.ids,),
            self.n,
            self.sampling,
            self.stopping,
            self.metadata,
            form=prompt.form,
            grammar=await core.grammar(admitted, prompt, self.structured, calls),
        )

    async def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            "id": head["id"],
            "object": OBJECT,
            "created": head["created"],
            "model": head["model"],
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
            "message": self._message(choice),
            "finish_reason": self.tools.finish(choice.finish, choice.calls),
        }
        if self.logprobs is not None:
            answer["logprobs"] = _logprobs_object(choice.tokens)
        return answer

    def _message(self, choice: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if not choice.parts:
            return {**message, "annotations": []}
        message["content"] = "".join(part.text for part in choice.parts if isinstance(part, Text))
        message["annotations"] = []
        thought = "".join(part.text for part in choice.parts if isinstance(part, Reasoning))
        if thought:
            message["reasoning_content"] = thought
        calls = _calls(choice.parts)
        if calls:
            message["content"] = message["content"] or None
            if self.tools.legacy:
                message["function_call"] = calls[0]["function"]
            else:
                message["tool_calls"] = calls
        return message

    def events(self, head: Mapping[str, Any]) -> ChunkEvents:
        """Those of a stream."""
        return ChunkEvents(self, head)

    def chunk_head(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """What stands in every chunk before its choices."""
        return {
            "id": head["id"],
            "object": CHUNK_OBJECT,
            "created": head["created"],
            "model": head["model"],
            "service_tier": "default",
            "system_fingerprint": None,
        }

    def chunk_tail(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing stands behind them."""
        return {}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice. There is no text to come where a call is forced."""
        content = None if self.tools.forced else ""
        return self._chunk(index, {"role": "assistant", "content": content, "refusal": None}, None, ())

    def content(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta shows, one chunk for each part; its log-probabilities are on the first."""
        tokens: Sequence[Token] = delta.tokens if self.logprobs is not None else ()
        if delta.parts:
            shown = [shown for part in delta.parts if (shown := self._part(part)) is not None]
        else:
            # Without a form there are no parts; with one there is nothing to show yet.
            shown = [{"content": delta.text}] if delta.text and not self._taken_apart else []
        if tokens and not shown:
            shown = [{"content": ""}]
        return [
            self._chunk(delta.index, each, None, () if place else tokens) for place, each in enumerate(shown)
        ]

    def _part(self, part: Part) -> dict[str, Any] | None:
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if isinstance(part, ToolCallStart):
            function = {"name": part.name, "arguments": ""}
            if self.tools.legacy:
                return {"function_call": function}
            return {
                "tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]
            }
        if isinstance(part, ToolCallArguments):
            fragment = {"arguments": part.text}
            if self.tools.legacy:
                return {"function_call": fragment}
            return {"tool_calls": [{"index": part.index, "function": fragment}]}
        return None

    def finish(self, delta: Delta) -> dict[str, Any] | None:
        """The last chunk of a choice."""
        return self._chunk(delta.index, {}, self.tools.finish(delta.finish, delta.calls), ())

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
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


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
    fields.unsupported("modalities", (["text"],))
    for name in ("audio", "prediction", "web_search_options", "verbosity", "moderation"):
        fields.unsupported(name)


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The calls of a whole answer, in order."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif isinstance(part, ToolCallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return calls


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
