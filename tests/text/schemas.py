"""Random JSON schemas, most of which can be enforced and satisfied."""

from __future__ import annotations

import random
import string
from typing import Any

LETTERS = string.ascii_lowercase + "žß龘🫠"


def random_schema(draw: random.Random) -> dict[str, Any]:
    """A schema with definitions of its own."""
    names = [f"d{i}" for i in range(draw.randint(0, 2))]
    schema = _schema(draw, 3, names)
    if names:
        schema["$defs"] = {name: _schema(draw, 1, []) for name in names}
    return schema


def _schema(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kinds = [_string, _number, _values, _plain]
    if depth:
        kinds += [_object, _object, _object, _array, _either]
    if names and draw.random() < 0.2:
        return {"$ref": f"#/$defs/{draw.choice(names)}"}
    schema = draw.choice(kinds)(draw, depth, names)
    if draw.random() < 0.2:
        schema["description"] = "remark"
    if draw.random() < 0.02:
        schema["uniqueItems"] = True
    return schema


def _plain(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null", "integer", ["integer", "null"], ["boolean", "string"]])}


def _string(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    match draw.randint(0, 4):
        case 0:
            schema["maxLength"] = draw.randint(0, 8)
        case 1:
            schema |= {"minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 9)}
        case 2:
            schema["pattern"] = draw.choice(["^[a-z]{1,4}$", "^a|b$", "x+", r"^\d{2}-\d{2}$", "^[^a-z]{2}$"])
        case 3:
            schema["format"] = draw.choice(["date", "time", "date-time", "ipv4", "uuid", "color"])
        case _:
            schema["maxLength"] = 5
    return schema


def _number(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw.choice(["integer", "number"])}
    low = draw.randint(-50, 50)
    if draw.random() < 0.6:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.6:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.randint(2, 300)
    if draw.random() < 0.15 and schema["type"] == "integer":
        schema["multipleOf"] = draw.choice([2, 5, 7])
    return schema


def _values(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    pool: list[Any] = [1, -2, 0.5, None, True, "a", "žluť", "龘🫠", 'qu"ote\\', {"k": [1]}, []]
    if draw.random() < 0.3:
        return {"const": draw.choice(pool)}
    return {"enum": draw.sample(pool, draw.randint(1, 4))}


def _object(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = ["".join(draw.choices(LETTERS, k=draw.randint(1, 5))) for _ in range(draw.randint(0, 4))]
    properties = {key: _schema(draw, depth - 1, names) for key in keys}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw.sample(sorted(properties), draw.randint(0, len(properties)))
    match draw.randint(0, 3):
        case 0:
            schema["additionalProperties"] = _schema(draw, 0, names)
        case 1:
            pass
        case _:
            schema["additionalProperties"] = False
    return schema


def _array(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _schema(draw, depth - 1, names)}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_schema(draw, 0, names) for _ in range(draw.randint(1, 2))]
    low = draw.randint(0, 2)
    if draw.random() < 0.5:
        schema["minItems"] = low
    schema["maxItems"] = low + draw.randint(0, 2)
    return schema


def _either(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    options = [_schema(draw, depth - 1, names) for _ in range(draw.randint(1, 3))]
    match draw.randint(0, 4):
        case 0:
            return {"allOf": options[:2]}
        case 1:
            return {"oneOf": options}
        case _:
            return {"anyOf": options}
