"""JSON, read once and strictly.

Python's own reader is lenient where clients of an inference API get hurt: it takes
the last of two equal names, NaN, and halves of surrogate pairs, and it recurses. So
depth is measured first, without recursion, and the rest is refused while reading.
It does not know what the fields mean.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from mesh.errors import InvalidRequest

DEPTH_MAX = 64
# Bodies above this are read in a thread.
INLINE_BYTES = 64 * 1024

# A whole string (an unfinished one runs to the end), or a bracket. Possessive: linear time.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises InvalidRequest with code `invalid_json`."""
    if _depth(body) > DEPTH_MAX:
        raise _refused(f"nested more than {DEPTH_MAX} levels deep")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"not valid UTF-8 at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise _refused("begins with a byte order mark")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _refused(f"{error.msg.lower()} at line {error.lineno}, column {error.colno}") from None
    except (RecursionError, ValueError):
        # A number with more digits than Python converts.
        raise _refused("a number is too long") from None
    if not isinstance(value, dict):
        raise _refused("expected an object")
    if _HALF_PAIR.search(text):
        _check_pairs(value)
    return value


def _depth(body: bytes) -> int:
    """The deepest nesting; stops counting above the limit."""
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
        return 0
    depth = deepest = 0
    for match in _TOKEN.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > deepest:
                deepest = depth
                if deepest > DEPTH_MAX:
                    break
        elif first in b"]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _refused(f"the name {name[:64]!a} occurs twice in one object")
            seen.add(name)
    return result


def _no_constant(word: str) -> NoReturn:
    raise _refused(f"{word} is not a JSON value")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _refused("a number is out of range")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _check_pairs(value: Any) -> None:
    """Refuses strings with half of a surrogate pair. Depth is bounded by now."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _refused("a string holds half of a surrogate pair") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_pairs(name)
            _check_pairs(item)
    elif isinstance(value, list):
        for item in value:
            _check_pairs(item)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")
