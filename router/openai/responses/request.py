"""`POST /v1/responses`: its fields, its answer and its stream.

The request becomes a chat request (`translated.py`): input items its messages, `text.format`
its `response_format`, flat tools its nested ones. What is asked to be kept is kept before the
client is told that it is complete.

| field | here |
|---|---|
| input, instructions, model, max_output_tokens, temperature, top_p, metadata, tools, tool_choice, parallel_tool_calls | served |
| text.format, reasoning.effort | as chat serves `response_format` and `reasoning_effort` |
| store, previous_response_id | served where responses are kept |
| include | `message.output_text.logprobs` with top_logprobs; `reasoning.encrypted_content` is accepted and there is none |
| stream, stream_options.include_obfuscation, truncation `disabled`, max_tool_calls, user, service_tier, ... | accepted |
| background, conversation, prompt, truncation `auto`, context_management, built-in tools | refused |
"""  # noqa: E501

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mesh.errors import InvalidRequest, MeshError, NotFound
from router.core.core import Admitted, Core
from router.core.request import Ask, Delta, Usage
from router.kept import KeptResponse, KeptResponses, KeptState
from router.openai import parameters
from router.openai.fields import Fields, wrong_type
from router.openai.responses.items import as_messages, read_input
from router.openai.responses.output import Output
from router.openai.translated import Translated, moved

ID_PREFIX = "resp_"
MAX_OUTPUT_LEAST = 16
_LOGPROBS = "message.output_text.logprobs"
_INCLUDE = frozenset({_LOGPROBS, "reasoning.encrypted_content"})

# Shown again as they were given.
_ECHOED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

_ANY = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]}

_encode = msgspec.json.Encoder().encode

# Chat's names for what has another name here.
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
    "tools": "tools",
    "tool_choice": "tool_choice",
}


class ResponsesRequest:
    """A read request. `names` are this endpoint's words for the core's fields."""

    names: Mapping[str, str] = {
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    def __init__(self, body: Mapping[str, Any]) -> None:
        fields = Fields(body)
        self.model = parameters.model_of(fields)
        self.stream = False
        self._fields = fields
        self._kept: KeptResponses | None = None

    def read(self) -> None:
        """The rest, once the caller may use the model; raises InvalidRequest."""
        fields = self._fields
        self.stream, _ = parameters.streaming_of(fields, with_usage=False)
        self.items = read_input(fields)
        self.instructions = fields.string("instructions")
        self.previous_id = fields.string("previous_response_id")
        self.store = fields.boolean("store", True)
        self._store_asked = "store" in fields.given
        self._given = fields.given
        self._body: dict[str, Any] = {"model": self.model}
        moved(
            fields,
            self._body,
            {
                "temperature": "temperature",
                "top_p": "top_p",
                "metadata": "metadata",
                "parallel_tool_calls": "parallel_tool_calls",
                "service_tier": "service_tier",
                "safety_identifier": "safety_identifier",
                "seed": "seed",
            },
        )
        self._max_output(fields)
        self._include(fields)
        self._format(fields)
        self._tools(fields)
        self._reasoning(fields)
        fields.unsupported("background", (False,))
        fields.unsupported("truncation", ("disabled",))
        for name in ("conversation", "prompt", "context_management", "moderation"):
            fields.unsupported(name)
        # It bounds calls of built-in tools, and there are none.
        fields.integer("max_tool_calls")
        fields.ignored("user", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
        fields.end()
        # Everything but the conversation is checked before anything is fetched for it.
        # One that goes on may begin with the result of a call that was made before it.
        items = self.items if self.previous_id is None else [_ANY]
        self._chat = Translated({**self._body, "messages": self._messages(items)}, _NAMES)

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Fetches what the conversation continues, renders and tokenises."""
        self._organisation = admitted.organisation.id
        self._kept = core.kept
        if self._kept is None:
            self._refuse_keeping()
        if self.previous_id is not None:
            items = [*await self._earlier(self.previous_id), *self.items]
            self._chat = Translated({**self._body, "messages": self._messages(items)}, _NAMES)
        elif self.store and self._kept is not None:
            await self._kept.check(self._organisation)
        ask = await self._chat.ask(core, admitted)
        self._apart = ask.form is not None
        return ask

    async def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer, kept if it is to be."""
        output = self.output()
        for delta in choices:
            list(output.take(delta))
        complete = choices[0].finish != "length"
        list(output.end(complete=complete))
        return await self.ended(head, output, usage, complete=complete)

    def events(self, head: Mapping[str, Any]) -> ResponseEvents:
        """Those of a stream."""
        return ResponseEvents(self, head)

    def output(self) -> Output:
        return Output(apart=self._apart, logprobs=self._wants_logprobs)

    async def ended(
        self, head: Mapping[str, Any], output: Output, usage: Usage, *, complete: bool
    ) -> dict[str, Any]:
        """The response as it is at its end; raises if it cannot be kept."""
        response = self.response(
            head,
            status="completed" if complete else "incomplete",
            output=output.items,
            usage=_usage(usage),
            completed_at=int(time.time()) if complete else None,
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
        )
        if self.store and self._kept is not None:
            kept = KeptResponse(
                head["id"], self.previous_id or "", head["created"], _encode(response), _encode(self.items)
            )
            await self._kept.put(self._organisation, kept)
        return response

    def response(self, head: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """The response object, as it is before anything has been generated, and `changes`."""
        body = self._body
        return {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": body.get("max_completion_tokens"),
            "max_tool_calls": self._given.get("max_tool_calls"),
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": self.previous_id,
            "reasoning": {"effort": self._effort, "summary": None},
            "service_tier": "default",
            "store": self.store,
            "temperature": body.get("temperature", 1.0),
            "text": {"format": self._shown_format},
            "tool_choice": self._tool_choice,
            "tools": self._shown_tools,
            "top_logprobs": body.get("top_logprobs", 0),
            "top_p": body.get("top_p", 1.0),
            "truncation": "disabled",
            "metadata": body.get("metadata") or {},
            # What the specification does not know as null is absent: these, and `usage` until it is known.
            **{name: value for name in _ECHOED if (value := self._given.get(name)) is not None},
            **changes,
        }

    # Reading.

    def _messages(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return as_messages(items, self.instructions)

    async def _earlier(self, previous_id: str) -> list[dict[str, Any]]:
        """The items of the conversation so far."""
        missing = InvalidRequest(
            f"Previous response with id '{previous_id[:80]}' not found.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
        if self._kept is None:
            raise missing
        try:
            chain = await self._kept.chain(self._organisation, previous_id)
        except NotFound:
            raise missing from None
        items: list[dict[str, Any]] = []
        for kept in chain:
            if kept.state is not KeptState.ENDED:
                raise InvalidRequest(
                    f"The response '{kept.id}' has not ended, and cannot be continued.",
                    code="invalid_value",
                    param="previous_response_id",
                )
            items += json.loads(kept.input_items)
            items += json.loads(kept.response)["output"]
        return items

    def _refuse_keeping(self) -> None:
        if self._store_asked and self.store:
            raise InvalidRequest(
                "Unsupported parameter: responses are not kept here. Send 'store': false.",
                code="unsupported_parameter",
                param="store",
            )
        self.store = False

    def _max_output(self, fields: Fields) -> None:
        most = fields.integer("max_output_tokens")
        if most is None:
            return
        if most < MAX_OUTPUT_LEAST:
            raise InvalidRequest(
                "Invalid 'max_output_tokens': integer below minimum value. "
                f"Expected a value >= {MAX_OUTPUT_LEAST}, but got {most} instead.",
                code="integer_below_min_value",
                param="max_output_tokens",
            )
        self._body["max_completion_tokens"] = most

    def _include(self, fields: Fields) -> None:
        include = fields.array("include") or []
        for item in include:
            if item not in _INCLUDE:
                raise InvalidRequest(
                    f"Unsupported value: 'include' supports {', '.join(sorted(_INCLUDE))} with this model.",
                    code="unsupported_value",
                    param="include",
                )
        top = fields.integer("top_logprobs")
        self._wants_logprobs = _LOGPROBS in include or bool(top)
        if self._wants_logprobs:
            self._body["logprobs"] = True
            self._body["top_logprobs"] = top or 0

    def _format(self, fields: Fields) -> None:
        text = fields.object("text")
        self._shown_format: dict[str, Any] = {"type": "text"}
        if text is None:
            return
        inner = Fields(text, "text")
        given = inner.object("format")
        verbosity = inner.take("verbosity")
        inner.end()
        if verbosity not in (None, "medium"):
            self._body["verbosity"] = verbosity
        if given is None:
            return
        self._shown_format = given
        kind = given.get("type")
        if kind == "json_schema":
            schema = {name: value for name, value in given.items() if name != "type"}
            self._body["response_format"] = {"type": kind, "json_schema": schema}
        else:
            self._body["response_format"] = given

    def _tools(self, fields: Fields) -> None:
        raw = fields.array("tools") or []
        tools = [_tool(f"tools[{place}]", tool) for place, tool in enumerate(raw)]
        if tools:
            self._body["tools"] = tools
        unsaid = {"parameters": None, "strict": False}
        self._shown_tools = [{"type": "function", **unsaid, **tool["function"]} for tool in tools]
        choice = fields.take("tool_choice")
        self._tool_choice = "auto" if choice is None else choice
        if isinstance(choice, dict):
            rest = {name: value for name, value in choice.items() if name != "type"}
            kind = choice.get("type")
            if kind == "allowed_tools":
                rest["tools"] = [_nested(tool) for tool in rest.get("tools") or ()]
            choice = {"type": kind, kind: rest} if isinstance(kind, str) else choice
        if choice is not None:
            self._body["tool_choice"] = choice

    def _reasoning(self, fields: Fields) -> None:
        reasoning = fields.object("reasoning")
        self._effort: str | None = None
        if reasoning is None:
            return
        inner = Fields(reasoning, "reasoning")
        self._effort = inner.string("effort")
        inner.unsupported("summary", ("auto", "concise", "detailed"))
        inner.unsupported("generate_summary", ("auto", "concise", "detailed"))
        inner.end()
        if self._effort is not None:
            self._body["reasoning_effort"] = self._effort


class ResponseEvents:
    """The typed events of one response, numbered from 0. No `[DONE]`: the last event says how it ended."""

    def __init__(self, request: ResponsesRequest, head: Mapping[str, Any]) -> None:
        self._request = request
        self._head = head
        self._output = request.output()
        self._number = 0
        self._finish = "stop"
        self._unsent = b""

    def begin(self, usage: Usage) -> bytes:
        """Says that there is a response, and that it is worked on."""
        response = self._request.response(self._head)
        return self._line({"type": "response.created", "response": response}) + self._line(
            {"type": "response.in_progress", "response": response}
        )

    def of(self, delta: Delta) -> bytes:
        """The events that a delta makes."""
        self._finish = delta.finish or self._finish
        return b"".join([self._line(event) for event in self._output.take(delta)])

    async def end(self, usage: Usage) -> bytes:
        """Closes the last item, keeps the response, and says how it ended."""
        complete = self._finish != "length"
        self._unsent = b"".join([self._line(event) for event in self._output.end(complete=complete)])
        response = await self._request.ended(self._head, self._output, usage, complete=complete)
        kind = "response.completed" if complete else "response.incomplete"
        return self._unsent + self._line({"type": kind, "response": response})

    def failed(self, error: MeshError) -> bytes:
        """The last event of a response that breaks."""
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        told = {"code": code, "message": error.message}
        response = self._request.response(self._head, status="failed", error=told, output=self._output.items)
        return self._unsent + self._line({"type": "response.failed", "response": response})

    def _line(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + _encode(event) + b"\n\n"


def _tool(where: str, raw: Any) -> dict[str, Any]:
    """A flat tool as chat nests it; the rest of it is chat's to check."""
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    kind = raw.get("type")
    if kind != "function":
        shown = kind if isinstance(kind, str) else "?"
        raise InvalidRequest(
            f"Unsupported value: '{where}.type' does not support '{shown[:32]}' with this model.",
            code="unsupported_value",
            param=f"{where}.type",
        )
    return {"type": "function", "function": {name: v for name, v in raw.items() if name != "type"}}


def _nested(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {n: v for n, v in tool.items() if n != "type"}}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
