"""Brings the messages of an API request into the shape that chat templates are written for.

Templates were written against Python objects, not against the API: text parts are joined with a newline, an
absent or null content becomes the empty string, other null values disappear, and the arguments of a tool
call, a JSON string in the API, become an object. Does not know roles; the template decides about these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from text.errors import TemplateError


def normalise(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """New messages for a template; the given ones are left alone.

    Raises `TemplateError` for a content part that is no text, or tool-call arguments that are no JSON object.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if value is not None or key == "content"}
    out["content"] = _text(index, out.get("content"))
    if "tool_calls" in out:
        out["tool_calls"] = [_tool_call(index, call) for call in out["tool_calls"]]
    return out


def _text(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TemplateError(f"messages[{index}].content is neither text nor a list of parts")
    return "\n".join([_part(index, at, part) for at, part in enumerate(content)])


def _part(index: int, at: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "refusal"):
        text = part.get(part["type"])
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateError(
        f"messages[{index}].content[{at}]: parts of type {kind!r} are not supported by this model"
    )


def _tool_call(index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in call.items() if value is not None}
    if isinstance(out.get("function"), Mapping):
        out["function"] = _with_parsed_arguments(index, out["function"])
    return _with_parsed_arguments(index, out)


def _with_parsed_arguments(index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in call.items() if value is not None}
    arguments = out.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"messages[{index}]: tool-call arguments are no JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise TemplateError(f"messages[{index}]: tool-call arguments are no JSON object")
        out["arguments"] = parsed
    return out
