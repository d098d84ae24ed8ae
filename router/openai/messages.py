"""The messages of a chat request, read into what chat templates are given.

| role | fields |
|---|---|
| system, developer, user | content (text or text parts), name |
| assistant | content (null with calls), tool_calls, function_call, refusal, reasoning_content, name |
| tool | content, tool_call_id |
| function | content, name: as `tool` |

null counts as absent, and an empty list of calls as none. Other kinds of parts are refused. Which roles and
orders a model takes is its template's to say.
"""

from __future__ import annotations

from typing import Any

from mesh.errors import InvalidRequest
from router.openai.fields import Fields, empty_array, wrong_type

MESSAGES_MAX = 16_384
CALLS_MAX = 128
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The field `messages`; raises InvalidRequest."""
    raw = fields.required("messages")
    if not isinstance(raw, list):
        raise wrong_type("messages", "an array of messages", raw)
    if not raw:
        raise empty_array("messages")
    if len(raw) > MESSAGES_MAX:
        raise InvalidRequest(
            f"Invalid 'messages': expected at most {MESSAGES_MAX}.",
            code="array_above_max_length",
            param="messages",
        )
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    for place, item in enumerate(raw):
        message = _message(f"messages[{place}]", item)
        called.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            raise InvalidRequest(
                f"Invalid value: 'messages[{place}]' is the result of a call that no earlier message made.",
                code="invalid_value",
                param=f"messages[{place}].tool_call_id",
            )
        messages.append(message)
    return messages


def _message(where: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    role = fields.required("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"Invalid value: '{where}.role'. Supported values are: {', '.join(sorted(ROLES))}.",
            code="invalid_value",
            param=f"{where}.role",
        )
    message: dict[str, Any] = {"role": role}
    if role == "assistant":
        _read_assistant(fields, message)
    else:
        message["content"] = _content(fields)
    if role == "tool":
        message["tool_call_id"] = fields.required_string("tool_call_id")
    name = fields.string("name")
    if name is not None:
        message["name"] = name
    elif role == "function":
        message["name"] = fields.required_string("name")
    if role == "function":
        message |= {"role": "tool", "tool_call_id": f"call_{message['name']}"}
    for unserved in ("tool_calls", "function_call", "audio"):
        fields.unsupported(unserved, ([],))
    # What an assistant's message of an earlier answer carries.
    fields.ignored("refusal", "annotations")
    fields.end()
    return message


def _read_assistant(fields: Fields, message: dict[str, Any]) -> None:
    calls = _calls(fields)
    legacy = fields.object("function_call")
    if legacy is not None:
        function = _function(Fields(legacy, fields.place("function_call")))
        calls.append({"id": f"call_{function['name']}", "type": "function", "function": function})
    if (calls or fields.has("refusal")) and not fields.has("content"):
        fields.take("content")
        message["content"] = fields.string("refusal") or ""
    else:
        message["content"] = _content(fields)
    if calls:
        message["tool_calls"] = calls
    thought = fields.string("reasoning_content")
    if thought:
        message["reasoning_content"] = thought


def _calls(fields: Fields) -> list[dict[str, Any]]:
    place = fields.place("tool_calls")
    raw = fields.array("tool_calls") or []
    if len(raw) > CALLS_MAX:
        raise InvalidRequest(
            f"Invalid '{place}': expected at most {CALLS_MAX}.", code="array_above_max_length", param=place
        )
    return [_call(f"{place}[{index}]", call) for index, call in enumerate(raw)]


def _call(where: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    kind = fields.string("type")
    if kind not in (None, "function"):
        raise InvalidRequest(
            f"Unsupported value: '{where}.type' does not support '{kind[:32]}' with this model.",
            code="unsupported_value",
            param=f"{where}.type",
        )
    inner = fields.required("function")
    if not isinstance(inner, dict):
        raise wrong_type(f"{where}.function", "an object", inner)
    call = {
        "id": fields.required_string("id"),
        "type": "function",
        "function": _function(Fields(inner, f"{where}.function")),
    }
    # Where a client puts the chunks of a stream together it may keep their index.
    fields.ignored("index")
    fields.end()
    return call


def _function(fields: Fields) -> dict[str, Any]:
    """`arguments` stays the JSON string that it is; rendering parses it."""
    function = {"name": fields.required_string("name"), "arguments": fields.string("arguments") or ""}
    fields.end()
    return function


def _content(fields: Fields) -> str:
    """Text, or text parts joined as the templates' own tools join them."""
    place = fields.place("content")
    raw = fields.take("content")
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise wrong_type(place, "a string or an array of text parts", raw)
    if not raw:
        raise empty_array(place)
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
    text = fields.required_string(kind)
    fields.ignored("prompt_cache_breakpoint")
    fields.end()
    return text
