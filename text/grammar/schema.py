"""Which JSON schemas are enforced, and what is made of them before they become a grammar.

Everything that a schema says is enforced, or the schema is refused. Size is bounded so that compiling takes
milliseconds; white space between the parts of the JSON is allowed, but bounded, so that no model can fill its
answer with it. Names that no draft of JSON Schema knows are dropped, as these say.

| what | bound |
|---|---|
| schemas inside (properties, items, alternatives, definitions) | 1,000, nested 32 deep |
| optional properties of one object (their cost grows with the square) | 400 |
| values of `enum` | 2,000 |
| text of it all | 64 KiB |
| alternatives that `allOf` multiplies | 16 |
| `pattern` | 512 characters |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from text.grammar.errors import GrammarError

SCHEMAS_MAX = 1000
DEPTH_MAX = 32
OPTIONAL_MAX = 400
ENUM_MAX = 2000
CHARS_MAX = 64 * 1024
PRODUCT_MAX = 16
PATTERN_MAX = 512
WHITE_SPACE = r"[ \n\r\t]{0,12}"

# Words by which a schema says itself what more may come, or that it is a part of another.
_OPEN = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
)
_ONE = ("items", "additionalProperties", "additionalItems")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_PLAIN = frozenset(
    {
        "type", "const", "enum", "required", "$ref", "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems",
        "minProperties", "maxProperties",
    }
)  # fmt: skip
_SILENT = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
        "$schema", "contentEncoding", "contentMediaType", "contentSchema",
    }
)  # fmt: skip
_UNENFORCED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
        "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$anchor", "$id", "id",
        "uniqueItems", "x-guidance",
    }
)  # fmt: skip
# What the compiler knows how to enforce; any other format is a remark, as JSON Schema has it.
_FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip


def enforced(schema: object) -> dict[str, Any] | bool:
    """The schema as it is compiled. Raises `GrammarError` that names the place of what cannot be enforced."""
    try:
        size = len(json.dumps(schema, ensure_ascii=False))
    except (RecursionError, ValueError) as error:
        raise GrammarError("the schema is nested too deeply") from error
    if size > CHARS_MAX:
        raise GrammarError(f"the schema has {size} characters; at most {CHARS_MAX} are accepted")
    walk = _Walk(schema)
    return walk.schema(schema, "#", 0)


class _Walk:
    """One pass over a schema, counting."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._schemas = 0
        self._values = 0

    def schema(self, schema: object, at: str, depth: int) -> dict[str, Any] | bool:
        self._schemas += 1
        if self._schemas > SCHEMAS_MAX:
            raise GrammarError(f"the schema has more than {SCHEMAS_MAX} schemas inside")
        if depth > DEPTH_MAX:
            raise GrammarError(f"the schema is nested more than {DEPTH_MAX} deep at {at}")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise GrammarError(f"the schema at {at} is neither an object nor a boolean")
        out: dict[str, Any] = {}
        for key, value in schema.items():
            self._keyword(out, key, value, f"{at}/{key}", depth)
        if "properties" in out and "type" not in out and not _MANY_KEYS & set(out) and "$ref" not in out:
            # What has properties is meant to be an object, whatever a validator would let pass.
            out["type"] = "object"
        _check_product(out, at)
        if _optional(out) > OPTIONAL_MAX:
            raise GrammarError(f"the object at {at} has more than {OPTIONAL_MAX} optional properties")
        return out

    def _keyword(self, out: dict[str, Any], key: str, value: Any, at: str, depth: int) -> None:
        if key in _UNENFORCED and not (key == "uniqueItems" and value is False) and depth + (key != "$id"):
            raise GrammarError(f"the keyword {key!r} at {at} cannot be enforced")
        if key in _ONE:
            out[key] = self.schema(value, at, depth + 1)
        elif key in _MANY:
            if not isinstance(value, list):
                raise GrammarError(f"{at} is no array of schemas")
            out[key] = [self.schema(item, f"{at}/{i}", depth + 1) for i, item in enumerate(value)]
        elif key in _NAMED:
            if not isinstance(value, Mapping):
                raise GrammarError(f"{at} is no object of schemas")
            out[key] = {name: self.schema(item, f"{at}/{name}", depth + 1) for name, item in value.items()}
        elif key in _PLAIN:
            self._plain(out, key, value, at)

    def _plain(self, out: dict[str, Any], key: str, value: Any, at: str) -> None:
        if key == "$ref":
            self._check_reference(value, at)
        elif key == "enum":
            self._values += len(value) if isinstance(value, list) else 0
            if self._values > ENUM_MAX:
                raise GrammarError(f"the schema has more than {ENUM_MAX} values in its enums")
        elif key == "pattern" and isinstance(value, str) and len(value) > PATTERN_MAX:
            raise GrammarError(f"the pattern at {at} has more than {PATTERN_MAX} characters")
        elif key == "format" and value not in _FORMATS:
            return
        out[key] = value

    def _check_reference(self, reference: object, at: str) -> None:
        """Only references into the schema itself, and none to nowhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GrammarError(f"the reference at {at} leads out of the schema; only '#…' is followed")
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise GrammarError(f"the reference at {at} leads nowhere: {reference[:128]!a}")


_MANY_KEYS = frozenset({"allOf", "anyOf", "oneOf"})


def _check_product(schema: Mapping[str, Any], at: str) -> None:
    """Alternatives below `allOf` are multiplied out by the compiler."""
    product = max(1, len(schema.get("anyOf", ()))) * max(1, len(schema.get("oneOf", ())))
    if "allOf" not in schema:
        if product > PRODUCT_MAX and "anyOf" in schema and "oneOf" in schema:
            raise GrammarError(f"too many combinations of alternatives at {at}")
        return
    for part in schema["allOf"]:
        product *= _alternatives(part)
    if product > PRODUCT_MAX:
        raise GrammarError(f"allOf combines more than {PRODUCT_MAX} alternatives at {at}")


def _optional(schema: object) -> int:
    """Properties that may be left out, with those of the parts that the compiler joins to one object."""
    if not isinstance(schema, Mapping):
        return 0
    properties, required = schema.get("properties", {}), schema.get("required", ())
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(set(properties) - named) + sum(_optional(part) for part in schema.get("allOf", ()))


def _alternatives(schema: object) -> int:
    if not isinstance(schema, Mapping):
        return 1
    own = max(1, len(schema.get("anyOf", ()))) * max(1, len(schema.get("oneOf", ())))
    for part in schema.get("allOf", ()):
        own *= _alternatives(part)
    return own


def closed(schema: Any) -> Any:
    """The schema of arguments without the properties that it neither names nor allows by a word of its own.

    JSON Schema lets any more come; a model that is made to call would invent some. What is left out is
    valid all the same. Objects that are put together of several schemas stay as they are.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if isinstance(made.get("items"), Mapping):
        made["items"] = closed(made["items"])
    properties = made.get("properties")
    if isinstance(properties, Mapping) and properties and not _OPEN & set(made):
        made["properties"] = {name: closed(inner) for name, inner in properties.items()}
        made["additionalProperties"] = False
    return made


def json_terminal(schema: object) -> str:
    """A Lark terminal of JSON that satisfies `schema`, which is checked on the way."""
    checked = enforced(schema)
    if isinstance(checked, bool):
        if not checked:
            raise GrammarError("the schema is false: nothing satisfies it")
        checked = {}
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return "%json " + json.dumps({**checked, **options}, ensure_ascii=False)
