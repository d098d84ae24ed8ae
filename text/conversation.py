"""Conversations with tools for chat templates that know none.

The functions are described in the system message, together with how to call them; calls of earlier turns
become the text that made them, and their results become messages of the user. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from text.errors import TemplateError
from text.messages import normalise

_OBJECT = '{"name": NAME, "arguments": {ARGUMENT: VALUE, ...}}'
_HOW: Mapping[str, str] = {
    "json": f"a JSON object {_OBJECT}, or an array of such objects to call several, and nothing else",
    "hermes": f"<tool_call>\n{_OBJECT}\n</tool_call>, once for each call",
    "llama3": 'a JSON object {"name": NAME, "parameters": {ARGUMENT: VALUE, ...}} and nothing else',
    "mistral": f"[TOOL_CALLS][{_OBJECT}] and nothing else",
    "pythonic": "[NAME(ARGUMENT=VALUE, ...)] and nothing else, with several calls separated by commas",
    "gemma": "```tool_code\nNAME(ARGUMENT=VALUE, ...)\n``` and nothing else, with one call in each line",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
    "```json\n{ARGUMENT: VALUE, ...}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> and nothing else",
}


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some message is a call or the result of one."""
    return any(m.get("role") in ("tool", "function") or m.get("tool_calls") for m in messages)


def plainly(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, form: str
) -> list[dict[str, Any]]:
    """The same conversation without tools, calls and results. Raises `TemplateError` as `normalise` does."""
    out: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in normalise(messages):
        calls = message.pop("tool_calls", None)
        if calls:
            names |= {str(call.get("id")): str(call["function"].get("name")) for call in calls}
            text = "\n".join([_call(call["function"], form) for call in calls])
            message["content"] = "\n".join(filter(None, [message["content"], text]))
        if message.get("role") in ("tool", "function"):
            name = names.get(str(message.get("tool_call_id")), message.get("name") or "the function")
            _add_result(out, f"Result of {name}:\n{message['content']}")
            continue
        out.append(message)
    if tools:
        _describe(out, tools, form)
    return out


def _add_result(out: list[dict[str, Any]], text: str) -> None:
    """Results in a row are one message, since templates may insist on turns."""
    if out and out[-1].get("results"):
        out[-1]["content"] += "\n\n" + text
    else:
        out.append({"role": "user", "content": text, "results": True})


def _describe(out: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: str) -> None:
    try:
        listed = "\n".join([json.dumps(tool["function"], ensure_ascii=False) for tool in tools])
    except RecursionError as error:
        raise TemplateError("the tools are nested too deeply") from error
    text = (
        f"You can call functions. Each line describes one, with a JSON schema of its arguments:\n{listed}\n"
        f"To call functions, answer with {_HOW[form]}. "
        "Call a function only if it helps; otherwise answer in plain text."
    )
    if out and out[0].get("role") in ("system", "developer"):
        out[0]["content"] = "\n\n".join(filter(None, [out[0]["content"], text]))
    else:
        out.insert(0, {"role": "system", "content": text})


def _call(function: Mapping[str, Any], form: str) -> str:
    arguments = function.get("arguments", {})
    key = "parameters" if form == "llama3" else "arguments"
    text = json.dumps({"name": function.get("name"), key: arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>" if form == "hermes" else text
