"""`POST /v1/messages`: its fields, its answer and its stream; and counting what its input would be.

| field | here |
|---|---|
| model, messages, system, max_tokens (needed), temperature (0 to 1), top_p, top_k | served |
| stop_sequences | up to 4; which one ended the answer is said |
| tools (custom ones), tool_choice | as chat serves them; `disable_parallel_tool_use` is at most one call |
| stream | typed events |
| thinking | `disabled`, and `enabled` where the model thinks anyway: how much is the model's own |
| metadata, service_tier, cache_control | accepted |
| container, mcp_servers, context_management, output_config, server tools | refused |

`usage.input_tokens` leaves out what came from the cache; that is `cache_read_input_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mesh.errors import InvalidRequest, MeshError
from router.core.core import Admitted, Core
from router.core.request import Ask, Delta, Usage
from router.openai import parameters
from router.openai.anthropic.blocks import read_messages, read_system
from router.openai.anthropic.errors import envelope
from router.openai.fields import Fields, wrong_type
from router.openai.translated import Translated, moved
from router.openai.unary import Call
from text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart

ID_PREFIX = "msg_"

_encode = msgspec.json.Encoder().encode

# Chat's names for what has another name here.
_NAMES: Mapping[str, str] = {
    "messages": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "tools": "tools",
    "tool_choice": "tool_choice",
}


class MessagesRequest:
    """A read request. `counts` reads one that only counts, and needs no `max_tokens`."""

    names: Mapping[str, str] = {"prompt": "messages", "stop": "stop_sequences"}

    def __init__(self, body: Mapping[str, Any], *, counts: bool = False) -> None:
        fields = Fields(body)
        self.model = parameters.model_of(fields)
        self.stream = False
        self._fields = fields
        self._counts = counts

    def read(self) -> None:
        """The rest, once the caller may use the model; raises InvalidRequest."""
        fields = self._fields
        self.stream = fields.boolean("stream")
        body: dict[str, Any] = {"model": self.model}
        most = fields.integer("max_tokens") if self._counts else fields.required("max_tokens")
        if most is not None:
            body["max_completion_tokens"] = most
        system = read_system(fields)
        messages = read_messages(fields)
        body["messages"] = [*([{"role": "system", "content": system}] if system else []), *messages]
        if fields.number("temperature", 1.0) > 1.0:
            raise InvalidRequest(
                "temperature: expected a value from 0 to 1.",
                code="decimal_above_max_value",
                param="temperature",
            )
        moved(
            Fields(fields.given),
            body,
            {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop_sequences": "stop"},
        )
        fields.ignored("top_p", "top_k", "stop_sequences")
        _tools(fields, body)
        _accepted(fields)
        fields.end()
        self._chat = Translated(body, _NAMES)

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Renders and tokenises."""
        ask = await self._chat.ask(core, admitted)
        self.apart = ask.form is not None
        return ask

    async def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        [choice] = choices
        content = Content()
        for part in self.parts(choice):
            content.take(part)
        return {
            **self.message(head, usage),
            "content": content.ended(),
            **self.stop(choice),
            "usage": usage_object(usage),
        }

    def events(self, head: Mapping[str, Any]) -> MessageEvents:
        """Those of a stream."""
        return MessageEvents(self, head)

    def parts(self, delta: Delta) -> Sequence[Part]:
        """What a delta says, taken apart."""
        if self.apart:
            return delta.parts
        return [Text(delta.text)] if delta.text else []

    def message(self, head: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
        """The message as it is before anything has been generated."""
        return {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
        }

    def stop(self, delta: Delta) -> dict[str, Any]:
        """Why the answer ended."""
        if delta.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if delta.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop}
        return {"stop_reason": "tool_use" if delta.calls else "end_turn", "stop_sequence": None}


class Content:
    """The blocks of a whole answer."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []

    def take(self, part: Part) -> None:
        """Adds to the last block, or begins one."""
        last = self._blocks[-1] if self._blocks else {}
        if isinstance(part, Text):
            if last.get("type") == "text":
                last["text"] += part.text
            else:
                self._blocks.append({"type": "text", "text": part.text})
        elif isinstance(part, Reasoning):
            if last.get("type") == "thinking":
                last["thinking"] += part.text
            else:
                self._blocks.append({"type": "thinking", "thinking": part.text, "signature": ""})
        elif isinstance(part, ToolCallStart):
            self._blocks.append({"type": "tool_use", "id": part.id, "name": part.name, "input": ""})
        elif isinstance(part, ToolCallArguments):
            last["input"] += part.text

    def ended(self) -> list[dict[str, Any]]:
        """With the arguments of calls as objects; a call that was cut off has what could be read."""
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        return self._blocks


class MessageEvents:
    """The typed events of one message."""

    def __init__(self, request: MessagesRequest, head: Mapping[str, Any]) -> None:
        self._request = request
        self._head = head
        self._index = -1
        self._open = ""
        self._stop: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}

    def begin(self, usage: Usage) -> bytes:
        """The message, without content."""
        return _line({"type": "message_start", "message": self._request.message(self._head, usage)})

    def of(self, delta: Delta) -> bytes:
        """The events that a delta makes."""
        events = [event for part in self._request.parts(delta) for event in self._part(part)]
        if delta.finish is not None:
            self._stop = self._request.stop(delta)
        return b"".join([_line(event) for event in events])

    async def end(self, usage: Usage) -> bytes:
        """Why it ended, and what it cost."""
        events = [
            *self._close(),
            {"type": "message_delta", "delta": self._stop, "usage": usage_object(usage)},
            {"type": "message_stop"},
        ]
        return b"".join([_line(event) for event in events])

    def failed(self, error: MeshError) -> bytes:
        """What ends a stream that breaks."""
        return _line(envelope(error))

    def _part(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, Text):
            block: dict[str, Any] = {"type": "text", "text": ""}
            return [*self._block("text", block), self._delta("text_delta", text=part.text)]
        if isinstance(part, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            return [*self._block("thinking", block), self._delta("thinking_delta", thinking=part.text)]
        if isinstance(part, ToolCallStart):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            return [*self._close(), *self._block("tool_use", block)]
        if isinstance(part, ToolCallArguments):
            return [self._delta("input_json_delta", partial_json=part.text)]
        return []

    def _block(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Opens a block, unless one of this kind is open."""
        if self._open == kind:
            return []
        closed = self._close()
        self._index += 1
        self._open = kind
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def _delta(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}


async def count_tokens(call: Call) -> dict[str, Any]:
    """How many tokens the input of a request is."""
    reading = MessagesRequest(await call.body(), counts=True)
    admitted = await call.admit(reading.model)
    reading.read()
    ask = await call.unless_gone(reading.ask(call.core, admitted))
    return {"input_tokens": len(ask.prompts[0])}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Counts as messages show them."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _tools(fields: Fields, body: dict[str, Any]) -> None:
    raw = fields.array("tools") or []
    if raw:
        body["tools"] = [_tool(f"tools[{place}]", tool) for place, tool in enumerate(raw)]
    choice = fields.object("tool_choice")
    if choice is None:
        return
    inner = Fields(choice, "tool_choice")
    kind = inner.required("type")
    if kind == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": inner.required("name")}}
    elif kind in ("auto", "any", "none"):
        body["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise InvalidRequest(
            "tool_choice.type: expected auto, any, tool or none.",
            code="invalid_value",
            param="tool_choice.type",
        )
    if inner.boolean("disable_parallel_tool_use"):
        body["parallel_tool_calls"] = False
    inner.end()


def _tool(where: str, raw: Any) -> dict[str, Any]:
    """A tool as chat nests it; the rest of it is chat's to check."""
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    fields.unsupported("type", ("custom",))
    fields.ignored("cache_control")
    function = {name: value for name, value in raw.items() if name not in ("type", "cache_control")}
    if "input_schema" in function:
        function["parameters"] = function.pop("input_schema")
    return {"type": "function", "function": function}


def _accepted(fields: Fields) -> None:
    """Reads what changes nothing, and refuses what would."""
    metadata = fields.object("metadata")
    if metadata is not None:
        inner = Fields(metadata, "metadata")
        inner.string("user_id")
        inner.end()
    fields.unsupported("service_tier", ("auto", "standard_only"))
    thinking = fields.object("thinking")
    if thinking is not None:
        inner = Fields(thinking, "thinking")
        inner.unsupported("type", ("enabled", "disabled", "adaptive"))
        inner.integer("budget_tokens")
        inner.end()
    for name in ("container", "mcp_servers", "context_management", "output_config", "output_format"):
        fields.unsupported(name)


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _line(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + _encode(event) + b"\n\n"
