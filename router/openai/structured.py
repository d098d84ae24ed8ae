"""What a request wants its answers to look like: `response_format`, and the names that vLLM has for more.

| field | here |
|---|---|
| response_format | text, json_object, json_schema (enforced whether strict or not) |
| structured_outputs | exactly one of json, json_object, regex, choice, grammar |
| guided_json, guided_regex, guided_choice, guided_grammar | the same, in older names |

At most one of these. A schema or grammar that cannot be enforced is refused before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from mesh.errors import InvalidRequest
from router.core.grammars import StructuredOutput
from router.openai.fields import Fields, wrong_type
from text.grammar.forms import of_choice, of_grammar, of_regex, of_schema, of_schema_text

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KINDS = ("json", "regex", "choice", "grammar")


def structured_of(fields: Fields) -> StructuredOutput | None:
    """The one wish, None for text. Raises InvalidRequest."""
    wishes = [wish for wish in (_response_format(fields), _structured_outputs(fields)) if wish is not None]
    for kind in _KINDS:
        name = f"guided_{kind}"
        if fields.has(name):
            wishes.append(StructuredOutput(name, _maker(kind, name, fields.take(name))))
    if len(wishes) > 1:
        raise InvalidRequest(
            f"Invalid '{wishes[1].param}': it cannot be used together with '{wishes[0].param}'.",
            code="invalid_value",
            param=wishes[1].param,
        )
    return wishes[0] if wishes else None


def _response_format(fields: Fields) -> StructuredOutput | None:
    raw = fields.object("response_format")
    if raw is None:
        return None
    inner = Fields(raw, "response_format")
    kind = inner.required("type")
    if kind == "json_schema":
        place, schema = inner.place("json_schema"), inner.required("json_schema")
        inner.end()
        if not isinstance(schema, dict):
            raise wrong_type(place, "an object", schema)
        return _json_schema(Fields(schema, place))
    inner.end()
    if kind == "json_object":
        return StructuredOutput("response_format", partial(of_schema, {"type": "object"}))
    if kind == "text":
        return None
    raise InvalidRequest(
        "Invalid value: 'response_format.type'. Supported are 'text', 'json_object' and 'json_schema'.",
        code="invalid_value",
        param="response_format.type",
    )


def _json_schema(fields: Fields) -> StructuredOutput:
    name = fields.required("name")
    place = fields.place("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"Invalid '{place}': expected 1 to 64 of a-z, A-Z, 0-9, '_' and '-'.",
            code="invalid_value",
            param=place,
        )
    fields.string("description")
    fields.boolean("strict")
    place, schema = fields.place("schema"), fields.object("schema")
    fields.end()
    return StructuredOutput(place, partial(of_schema, {"type": "object"} if schema is None else schema))


def _structured_outputs(fields: Fields) -> StructuredOutput | None:
    raw = fields.object("structured_outputs")
    if raw is None:
        return None
    inner = Fields(raw, "structured_outputs")
    wishes = [
        StructuredOutput(inner.place(kind), _maker(kind, inner.place(kind), inner.take(kind)))
        for kind in _KINDS
        if inner.has(kind)
    ]
    if inner.boolean("json_object"):
        wishes.append(StructuredOutput(inner.place("json_object"), partial(of_schema, {"type": "object"})))
    inner.end()
    if len(wishes) != 1:
        raise InvalidRequest(
            "Invalid 'structured_outputs': expected one of json, json_object, regex, choice and grammar.",
            code="invalid_value",
            param="structured_outputs",
        )
    return wishes[0]


def _maker(kind: str, place: str, value: Any) -> Callable[[], str]:
    if kind == "json":
        if not isinstance(value, (dict, str)):
            raise wrong_type(place, "a schema, as an object or as JSON", value)
        return partial(of_schema_text, value) if isinstance(value, str) else partial(of_schema, value)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise wrong_type(place, "an array of strings", value)
        return partial(of_choice, value)
    if not isinstance(value, str):
        raise wrong_type(place, "a string", value)
    return partial(of_regex if kind == "regex" else of_grammar, value)
