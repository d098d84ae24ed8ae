"""JSON as a token's issuer must write it: one meaning, bounded, no surprises.

Refused where Python's own parser is lenient: a member named twice (the last would
win), NaN and infinities, numbers that overflow to infinity, lone surrogates, and
nesting beyond a cap (which would end in RecursionError).
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 8


class StrictJsonError(ValueError):
    """The text is not JSON of the strict kind."""


def loads(data: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value in UTF-8 `data`. Raises StrictJsonError and nothing else."""
    try:
        _check_depth(data, max_depth)
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_number,
            parse_constant=_refuse,
        )
        if b"\\" in data:
            # An escape can spell a surrogate that no UTF-8 text can carry.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except StrictJsonError:
        raise
    except ValueError as error:
        raise StrictJsonError("not valid JSON") from error
    return value


def _check_depth(data: bytes, limit: int) -> None:
    if data.count(b"[") + data.count(b"{") <= limit:
        return
    # A scan of the bytes, before any parser recurses: in UTF-8 no part of a longer
    # character equals an ASCII byte.
    depth = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            if depth > limit:
                raise StrictJsonError(f"nested deeper than {limit} levels")
        elif byte in b"]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise StrictJsonError("a member occurs twice")
    return members


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError("a number is out of range")
    return value


def _refuse(text: str) -> float:
    raise StrictJsonError(f"{text} is not JSON")
