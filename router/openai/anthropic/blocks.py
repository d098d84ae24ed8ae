"""Conversations of the messages dialect, as the chat messages that they are.

| block | here |
|---|---|
| text | its text |
| tool_use | a call of the assistant |
| tool_result | text, or text blocks: the result of a call; `is_error` is said in the text |
| thinking | goes to the template with the answer it belongs to; redacted_thinking is left out |
| image, document, search_result, server tools | refused |
"""

from __future__ import annotations

import json
from typing import Any

from mesh.errors import InvalidRequest
from router.openai.fields import Fields, wrong_type

MESSAGES_MAX = 16_384
_ROLES = ("user", "assistant")


def read_system(fields: Fields) -> str | None:
    """The field `system`: a text, or text blocks."""
    raw = fields.take("system")
    if raw is None or isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise wrong_type("system", "a string or an array of text blocks", raw)
    return "\n".join(_text_block(f"system[{place}]", block) for place, block in enumerate(raw))


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The field `messages` as chat messages; raises InvalidRequest."""
    raw = fields.required("messages")
    if not isinstance(raw, list):
        raise wrong_type("messages", "an array of messages", raw)
    if not raw:
        raise InvalidRequest(
            "messages: at least one message is required.", code="empty_array", param="messages"
        )
    if len(raw) > MESSAGES_MAX:
        raise InvalidRequest(
            f"messages: at most {MESSAGES_MAX} are accepted.", code="array_above_max_length", param="messages"
        )
    return [message for place, item in enumerate(raw) for message in _message(f"messages[{place}]", item)]


def _message(where: str, raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    role = fields.required("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role: expected 'user' or 'assistant'.", code="invalid_value", param=f"{where}.role"
        )
    content = fields.required("content")
    fields.end()
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a string or an array of blocks", content)
    blocks = [_block(f"{where}.content[{place}]", role, block) for place, block in enumerate(content)]
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results come first, as a chat template expects them, then what the user says."""
    results = [block for block in blocks if block.get("role") == "tool"]
    texts = [block["text"] for block in blocks if "text" in block]
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _assistant(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(block["text"] for block in blocks if "text" in block),
    }
    calls = [block["call"] for block in blocks if "call" in block]
    if calls:
        message["tool_calls"] = calls
    thought = "".join(block["thinking"] for block in blocks if "thinking" in block)
    if thought:
        message["reasoning_content"] = thought
    return [message]


def _block(where: str, role: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    kind = raw.get("type")
    if kind == "text":
        return {"text": _text_block(where, raw)}
    fields = Fields(raw, where)
    fields.take("type")
    fields.ignored("cache_control")
    if kind == "tool_result" and role == "user":
        return _result(fields)
    if kind == "tool_use" and role == "assistant":
        return _use(fields)
    if kind == "thinking" and role == "assistant":
        thinking = fields.required_string("thinking")
        fields.ignored("signature")
        fields.end()
        return {"thinking": thinking}
    if kind == "redacted_thinking" and role == "assistant":
        return {}
    shown = kind if isinstance(kind, str) else "?"
    raise InvalidRequest(
        f"{where}.type: '{shown[:32]}' is not supported here with this model.",
        code="unsupported_value",
        param=f"{where}.type",
    )


def _result(fields: Fields) -> dict[str, Any]:
    call_id = fields.required_string("tool_use_id")
    place, content = fields.place("content"), fields.take("content")
    failed = fields.boolean("is_error")
    fields.end()
    if content is None:
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_text_block(f"{place}[{index}]", block) for index, block in enumerate(content))
    elif not isinstance(content, str):
        raise wrong_type(place, "a string or an array of text blocks", content)
    return {"role": "tool", "tool_call_id": call_id, "content": f"Error: {content}" if failed else content}


def _use(fields: Fields) -> dict[str, Any]:
    call_id, name = fields.required_string("id"), fields.required_string("name")
    arguments = fields.object("input")
    fields.ignored("caller")
    fields.end()
    function = {"name": name, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
    return {"call": {"id": call_id, "type": "function", "function": function}}


def _text_block(where: str, raw: Any) -> str:
    if not isinstance(raw, dict):
        raise wrong_type(where, "a text block", raw)
    fields = Fields(raw, where)
    fields.unsupported("type", ("text",))
    text = fields.required_string("text")
    # Caching is by itself; citations belong to documents.
    fields.ignored("cache_control", "citations")
    fields.end()
    return text
