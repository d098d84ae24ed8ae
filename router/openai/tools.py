"""The tools of a chat request: what may be called, what must be, and in which of the two dialects.

| field | here |
|---|---|
| tools | up to 128 functions; names of 1 to 64 of `[a-zA-Z0-9_-]`, each once; `custom` ones are refused |
| tool_choice | none, auto, required, a function, or allowed_tools; tools that are left out are not shown |
| parallel_tool_calls | false: at most one call |
| functions, function_call | the older names: answered with `function_call`, at most one call |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mesh.errors import InvalidRequest
from router.core.grammars import CallOutput
from router.openai.fields import Fields, wrong_type
from text.tool_parsers import Function

TOOLS_MAX = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `parameters` is the JSON schema of its arguments, as it was given."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool

    def shown(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are those that may be called. `legacy`: answers say `function_call`."""

    tools: Sequence[Tool] = ()
    mode: Mode = "none"
    parallel: bool = True
    legacy: bool = False

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")

    def output(self, *, structured: bool) -> CallOutput | None:
        """What a grammar has to see to: calls that are forced, arguments that are strict.

        `structured`: the text of the answer has a grammar, which must leave room for calls.
        """
        if not self.tools or not (self.forced or structured or any(tool.strict for tool in self.tools)):
            return None
        functions = [(Function(tool.name, tool.parameters), tool.strict) for tool in self.tools]
        many = self.parallel and self.mode != "named"
        return CallOutput(functions, self.forced, many, "functions" if self.legacy else "tools")

    def finish(self, finish: str | None, calls: int) -> str | None:
        """The finish reason of an answer with `calls` calls. A named call ends with `stop`, as at OpenAI."""
        if finish != "stop" or not calls or self.mode == "named":
            return finish
        return "function_call" if self.legacy else "tool_calls"


def tools_of(fields: Fields) -> ToolUse:
    """Reads every field about tools; raises InvalidRequest."""
    tools = [_tool(f"tools[{i}]", raw) for i, raw in enumerate(_array(fields, "tools"))]
    functions = [_function(f"functions[{i}]", raw) for i, raw in enumerate(_array(fields, "functions"))]
    if tools and functions:
        raise _invalid("functions", "'functions' and 'tools' cannot be used together.")
    legacy = bool(functions)
    _once(functions if legacy else tools, "functions" if legacy else "tools")
    parallel = fields.boolean("parallel_tool_calls", True)
    name = "function_call" if legacy else "tool_choice"
    fields.unsupported("tool_choice" if legacy else "function_call", ("none", "auto"))
    use = _chosen(name, fields.take(name), functions if legacy else tools)
    return ToolUse(use.tools, use.mode, parallel and not legacy, legacy)


def _chosen(param: str, choice: Any, tools: list[Tool]) -> ToolUse:
    if not tools:
        if choice in (None, "none", "auto"):
            return ToolUse()
        raise _invalid(param, f"Invalid value for '{param}': it is only allowed when tools are given.")
    if choice == "none":
        return ToolUse()
    if choice is None or choice == "auto":
        return ToolUse(tools, "auto")
    if choice == "required" and param == "tool_choice":
        return ToolUse(tools, "required")
    if not isinstance(choice, dict):
        known = "'none', 'auto'" + (", 'required'" if param == "tool_choice" else "")
        raise _invalid(param, f"Invalid value: '{param}'. Supported values are: {known} and an object.")
    fields = Fields(choice, param)
    if param == "function_call":
        return ToolUse([_named(fields, tools)], "named")
    kind = fields.required("type")
    if kind == "function":
        inner = _object(fields, "function")
        fields.end()
        return ToolUse([_named(inner, tools)], "named")
    if kind == "allowed_tools":
        allowed = _object(fields, "allowed_tools")
        fields.end()
        return _allowed(allowed, tools)
    raise InvalidRequest(
        f"Unsupported value: '{param}.type' supports 'function' and 'allowed_tools'.",
        code="unsupported_value",
        param=f"{param}.type",
    )


def _allowed(fields: Fields, tools: list[Tool]) -> ToolUse:
    mode = fields.required("mode")
    if mode not in ("auto", "required"):
        raise _invalid(fields.place("mode"), f"Invalid value: '{fields.place('mode')}'.")
    place = fields.place("tools")
    raw = fields.array("tools") or []
    fields.end()
    names: list[str] = []
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise wrong_type(f"{place}[{index}]", "an object", item)
        inner = Fields(item, f"{place}[{index}]")
        inner.unsupported("type", ("function",))
        names.append(_named(_object(inner, "function"), tools).name)
        inner.end()
    if not names:
        raise _invalid(place, f"Invalid '{place}': expected at least one tool.", "empty_array")
    return ToolUse([tool for tool in tools if tool.name in names], mode)


def _named(fields: Fields, tools: list[Tool]) -> Tool:
    place = fields.place("name")
    name = fields.required("name")
    fields.end()
    for tool in tools:
        if tool.name == name:
            return tool
    raise _invalid(place, f"Invalid value: '{place}' names none of the tools.")


def _tool(where: str, raw: Any) -> Tool:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    if fields.required("type") != "function":
        raise InvalidRequest(
            f"Unsupported value: '{where}.type' supports 'function' only with this model.",
            code="unsupported_value",
            param=f"{where}.type",
        )
    place, inner = fields.place("function"), fields.required("function")
    fields.end()
    return _function(place, inner)


def _function(where: str, raw: Any) -> Tool:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    fields = Fields(raw, where)
    name = fields.required("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        place = fields.place("name")
        raise _invalid(place, f"Invalid '{place}': expected 1 to 64 of a-z, A-Z, 0-9, '_' and '-'.")
    description = fields.string("description")
    parameters = fields.object("parameters")
    strict = fields.boolean("strict")
    fields.end()
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    return Tool(name, description, parameters, strict)


def _once(tools: Sequence[Tool], param: str) -> None:
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _invalid(f"{param}[{index}]", f"Invalid '{param}': the function '{name}' is there twice.")


def _array(fields: Fields, name: str) -> list[Any]:
    raw = fields.array(name) or []
    if len(raw) > TOOLS_MAX:
        raise _invalid(
            name,
            f"Invalid '{name}': array too long. Expected an array with maximum length {TOOLS_MAX}, "
            f"but got an array with length {len(raw)} instead.",
            "array_above_max_length",
        )
    return raw


def _object(fields: Fields, name: str) -> Fields:
    place, raw = fields.place(name), fields.required(name)
    if not isinstance(raw, dict):
        raise wrong_type(place, "an object", raw)
    return Fields(raw, place)


def _invalid(param: str, message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, code=code, param=param)
