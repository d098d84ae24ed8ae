"""Grammars out of what a request asks for, each as one text in the Lark dialect of `llguidance`.

That text is the only form in which grammars travel and are compiled. Knows no tokens but the marks that it is
given, and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from text import reasoning
from text.grammar.errors import GrammarError
from text.grammar.schema import json_terminal
from text.tool_parsers import FORMATS, MARKED
from text.tool_parsers.lark import Function, Mark, json_of, literal

GRAMMAR_MAX = 32 * 1024
TEXT_MAX = 256 * 1024
REGEX_MAX = 4096
CHOICES_MAX = 1000
# Formats whose calls are JSON and nothing else, and what they call the arguments.
_JSON_KEYS = {"json": "arguments", "llama3": "parameters"}


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that an answer may, or must, consist of.

    `forced`: nothing else. `many`: more than one of them.
    """

    format: str
    functions: Sequence[Function]
    forced: bool
    many: bool


def of_schema(schema: object) -> str:
    """JSON that satisfies `schema`; raises `GrammarError` for one that cannot be enforced."""
    return f"start: {json_terminal(schema)}"


def of_schema_text(schema: str) -> str:
    """The same, for a schema that is JSON."""
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError("the schema is no JSON") from error
    return of_schema(read)


def of_regex(regex: str) -> str:
    """Text that the whole of `regex` matches."""
    from llguidance import regex_to_lark

    if len(regex) > REGEX_MAX:
        raise GrammarError(f"the regex has {len(regex)} characters; at most {REGEX_MAX} are accepted")
    return f"start: /{regex_to_lark(regex, '')}/" if regex else 'start: ""'


def of_choice(choices: Sequence[str]) -> str:
    """One of these texts."""
    if not 1 <= len(choices) <= CHOICES_MAX or not all(choices):
        raise GrammarError(f"expected 1 to {CHOICES_MAX} texts, none of them empty")
    return _bounded("start: " + " | ".join(map(literal, dict.fromkeys(choices))))


def of_grammar(grammar: str) -> str:
    """A grammar in Lark, or in GBNF, which is translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    if len(grammar) > GRAMMAR_MAX:
        raise GrammarError(f"the grammar has {len(grammar)} characters; at most {GRAMMAR_MAX} are accepted")
    try:
        return _bounded(any_to_lark(grammar))
    except GrammarError:
        raise
    except (Exception, RecursionError) as error:
        raise GrammarError(f"the grammar cannot be read: {str(error)[:200]}") from error


def of_calls(calls: Calls, mark: Mark, body: str | None = None) -> str:
    """Forced calls; or else calls where the format has a place for them, and `body` (None: any text)."""
    form = FORMATS[calls.format]
    functions = [Function(f.name, _arguments(f.schema)) for f in calls.functions]
    try:
        if calls.forced:
            return _bounded("start: calls\n" + form.grammar(functions, mark, many=calls.many))
        rules = form.grammar(functions, mark, many=calls.many, opened=calls.format in MARKED)
    except RecursionError as error:
        raise GrammarError("the schemas are nested too deeply") from error
    if body is not None:
        if calls.format in _JSON_KEYS:
            # Read by the same rules as a body that is JSON: which of the two it is shows later.
            rules = _json_calls(functions, _JSON_KEYS[calls.format], many=calls.many)
        begin = mark(form.MARKS[0]) if calls.format in MARKED else ""
        return _joined(lambda body: f"start: {begin} calls | {body}\n{rules}", body)
    if calls.format not in MARKED:
        # Without a mark a call is told from text by how it begins.
        return _bounded("\n".join(["start: calls | PLAIN", r"PLAIN: /([^\s\[{`](.|\n)*)?/", rules]))
    lead = _lead(mark(form.MARKS[0]))
    # After the calls of one mark there may be more text, and another.
    return _bounded("\n".join(["start: (lead calls)* TAIL", lead, r"TAIL: /(.|\n)*/", rules]))


def _json_calls(functions: Sequence[Function], key: str, *, many: bool) -> str:
    """The rule `calls`, with each call as one value of JSON."""
    ones = [_json_call(function, key) for function in functions]
    lines = ["calls: call" + (' | "[" call ("," call)* "]"' if many and key == "arguments" else "")]
    return "\n".join([*lines, "call: " + " | ".join(json_of(one) for one in ones)])


def _json_call(function: Function, key: str) -> dict[str, Any]:
    """The schema of a whole call. References count from its root, so definitions move there."""
    inner = dict(function.schema)
    moved: dict[str, Any] = {
        name: inner.pop(name) for name in ("$defs", "definitions", "x-guidance") if name in inner
    }
    for reference in re.findall(r'"\$ref": "([^"]*)"', json.dumps(function.schema)):
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            raise GrammarError(
                f"the reference {reference[:128]!a} of {function.name} cannot be followed here"
            )
    properties = {"name": {"const": function.name}, key: inner}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", key],
        "additionalProperties": False,
        **moved,
    }


def after_reasoning(grammar: str, name: str, mark: Mark, *, opened: bool) -> str:
    """The same grammar for what comes after the thinking of a model; `opened`: it is thinking already."""
    begin, end = reasoning.MARKS[name]
    rules = f"SPACE: /[ \\n]{{0,4}}/\n{_lead(mark(end), 'think')}"

    def write(body: str) -> str:
        if opened:
            return f"start: think SPACE {body}\n{rules}"
        return f"start: {body} | {mark(begin)} think SPACE {body}\n{rules}"

    return _joined(write, grammar)


def _lead(mark: str, rule: str = "lead") -> str:
    """Text up to a mark and the mark."""
    if mark.startswith("<["):
        return f"{rule}: FREE {mark}\nFREE: /(.|\\n)*/"
    return f"{rule}[lazy]: /(.|\\n)*/ {mark}"


def _joined(write: Callable[[str], str], body: str) -> str:
    """A grammar that uses another one; `write` gets the name by which to refer to that."""
    inner: list[dict[str, str]] = [{"lark_grammar": body}]
    if body.startswith('{"grammars":'):
        inner = json.loads(body)["grammars"]
    name = f"body_{len(inner)}"
    grammars = [{"lark_grammar": write(f"@{name}")}, {**inner[0], "name": name}, *inner[1:]]
    return _bounded(json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":")))


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """What is compiled for the arguments of a call: an object, with bounded white space."""
    if schema.get("type", "object") != "object":
        raise GrammarError("the schema of a function's arguments is not that of an object")
    text = json_terminal({"type": "object", **schema}).removeprefix("%json ")
    read: dict[str, Any] = json.loads(text)
    return read


def mark_of(token: Callable[[str], int | None]) -> Mark:
    """`token(text)` is the control token of exactly this text, if the model has one."""

    def mark(text: str) -> str:
        found = token(text)
        return literal(text) if found is None else f"<[{found}]>"

    return mark


def _bounded(text: str) -> str:
    if len(text) > TEXT_MAX:
        raise GrammarError(f"the grammar has {len(text)} characters; at most {TEXT_MAX} are accepted")
    return text
