"""Items of a conversation: how they come in, how they are kept, and the chat messages that they are.

| item | here |
|---|---|
| message | roles user, system, developer, assistant; content a text, or text and refusal parts |
| function_call, function_call_output | a call of an earlier answer, and its result (text) |
| reasoning | its text goes to the template with the answer that follows |
| anything else (images, files, references, built-in tools) | refused |
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from mesh.errors import InvalidRequest
from router.openai.fields import Fields, wrong_type

ITEMS_MAX = 16_384
ROLES = frozenset({"user", "assistant", "system", "developer"})
_STATUS = ("in_progress", "completed", "incomplete")


def new_id(kind: str) -> str:
    """An id that nobody can guess."""
    return f"{kind}_{secrets.token_hex(24)}"


def read_input(fields: Fields) -> list[dict[str, Any]]:
    """The field `input` as whole items with ids; raises InvalidRequest."""
    raw = fields.required("input")
    if isinstance(raw, str):
        return [_message_item("user", [{"type": "input_text", "text": raw}])]
    if not isinstance(raw, list):
        raise wrong_type("input", "a string or an array of items", raw)
    if not raw:
        raise InvalidRequest("Invalid 'input': empty array.", code="empty_array", param="input")
    if len(raw) > ITEMS_MAX:
        raise InvalidRequest(
            f"Invalid 'input': expected at most {ITEMS_MAX} items.",
            code="array_above_max_length",
            param="input",
        )
    return [_item(f"input[{place}]", item) for place, item in enumerate(raw)]


def as_messages(items: Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as chat messages: an answer's reasoning, text and calls become one message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    thought = ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thought += "".join(part["text"] for part in item.get("content") or ())
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            last = messages[-1] if messages else None
            if last is not None and last["role"] == "assistant" and not thought:
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            text = "\n".join(part.get("text", part.get("refusal", "")) for part in item["content"])
            messages.append({"role": item["role"], "content": text})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _item(where: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    kind = fields.string("type") or "message"
    readers = {
        "message": _message,
        "function_call": _function_call,
        "function_call_output": _function_call_output,
        "reasoning": _reasoning,
    }
    reader = readers.get(kind)
    if reader is None:
        raise InvalidRequest(
            f"Unsupported value: '{where}.type' does not support '{kind[:32]}' with this model.",
            code="unsupported_value",
            param=f"{where}.type",
        )
    given = fields.string("id")
    item = reader(fields)
    status = fields.string("status")
    if status is not None and status not in _STATUS:
        raise InvalidRequest(
            f"Invalid value: '{where}.status'.", code="invalid_value", param=f"{where}.status"
        )
    fields.end()
    return {**item, "id": given} if given else item


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.required("role")
    if not isinstance(role, str) or role not in ROLES:
        place = fields.place("role")
        raise InvalidRequest(
            f"Invalid value: '{place}'. Supported values are: {', '.join(sorted(ROLES))}.",
            code="invalid_value",
            param=place,
        )
    place = fields.place("content")
    raw = fields.required("content")
    fields.ignored("phase")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(raw, str):
        return _message_item(role, [{"type": kind, "text": raw}])
    if not isinstance(raw, list):
        raise wrong_type(place, "a string or an array of parts", raw)
    return _message_item(role, [_part(f"{place}[{index}]", part) for index, part in enumerate(raw)])


def _message_item(role: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    for part in content:
        if part["type"] == "output_text":
            part |= {"annotations": [], "logprobs": []}
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": content,
    }


def _part(place: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong_type(place, "an object", raw)
    fields = Fields(raw, place)
    kind = fields.required("type")
    if kind not in ("input_text", "output_text", "refusal"):
        shown = kind if isinstance(kind, str) else "?"
        raise InvalidRequest(
            f"Unsupported value: '{place}.type' does not support '{shown[:32]}' with this model.",
            code="unsupported_value",
            param=f"{place}.type",
        )
    name = "refusal" if kind == "refusal" else "text"
    text = _text(fields, name)
    # What an answer's part carries.
    fields.ignored("annotations", "logprobs", "prompt_cache_breakpoint")
    fields.end()
    return {"type": kind, name: text}


def _function_call(fields: Fields) -> dict[str, Any]:
    item = {
        "id": new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": _text(fields, "call_id"),
        "name": _text(fields, "name"),
        "arguments": _text(fields, "arguments"),
    }
    fields.ignored("namespace", "caller")
    return item


def _function_call_output(fields: Fields) -> dict[str, Any]:
    place = fields.place("output")
    output = fields.required("output")
    if isinstance(output, list):
        parts = [_part(f"{place}[{index}]", part) for index, part in enumerate(output)]
        output = "\n".join(part.get("text", "") for part in parts)
    if not isinstance(output, str):
        raise wrong_type(place, "a string or an array of text parts", output)
    return {
        "id": new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": _text(fields, "call_id"),
        "output": output,
    }


def _reasoning(fields: Fields) -> dict[str, Any]:
    content = []
    for index, raw in enumerate(fields.array("content") or ()):
        place = f"{fields.place('content')}[{index}]"
        if not isinstance(raw, dict):
            raise wrong_type(place, "an object", raw)
        part = Fields(raw, place)
        part.unsupported("type", ("reasoning_text",))
        content.append({"type": "reasoning_text", "text": _text(part, "text")})
        part.end()
    # Summaries are for readers; there is no encrypted content that could be read back.
    fields.ignored("summary")
    fields.unsupported("encrypted_content")
    return {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content}


def _text(fields: Fields, name: str) -> str:
    value = fields.required(name)
    if not isinstance(value, str):
        raise wrong_type(fields.place(name), "a string", value)
    return value
