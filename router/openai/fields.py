"""Typed reading of a request's fields, with OpenAI's words for what is wrong.

A `Fields` is consumed field by field. null counts as absent, as it does for OpenAI.
What is left over at the end is refused by name: a field that would change the result
is never ignored. It does not know which fields exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mesh.errors import InvalidRequest

INT_DIGITS_MAX = 2**63


class Fields:
    """One JSON object of a request; `where` is its place, for `param`."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self._raw = dict(raw)
        self._where = where
        # All that was given, null or not, also after it has been taken.
        self.given = raw

    def place(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> Any:
        """The raw value, None if absent."""
        return self._raw.pop(name, None)

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def required(self, name: str) -> Any:
        if self._raw.get(name) is None:
            raise InvalidRequest(
                f"Missing required parameter: '{self.place(name)}'.",
                code="missing_required_parameter",
                param=self.place(name),
            )
        return self.take(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(self.place(name), "a boolean", value)
        return value

    def integer(self, name: str) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        return integer(self.place(name), value)

    def number(self, name: str, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(self.place(name), "a decimal", value)
        if (isinstance(value, int) and abs(value) >= INT_DIGITS_MAX) or not math.isfinite(value):
            raise InvalidRequest(
                f"Invalid '{self.place(name)}': number out of range.",
                code="invalid_value",
                param=self.place(name),
            )
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self.place(name), "a string", value)
        return value

    def required_string(self, name: str) -> str:
        value = self.required(name)
        if not isinstance(value, str):
            raise wrong_type(self.place(name), "a string", value)
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_type(self.place(name), "an object", value)
        return value

    def array(self, name: str) -> list[Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise wrong_type(self.place(name), "an array", value)
        return value

    def ignored(self, *names: str) -> None:
        """Fields that change nothing about the result."""
        for name in names:
            self._raw.pop(name, None)

    def unsupported(self, name: str, neutral: Sequence[Any] = ()) -> None:
        """A field that would change the result and is not served; `neutral` values would not."""
        value = self.take(name)
        # By type as well: 1 is not True.
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            return
        raise InvalidRequest(
            f"Unsupported parameter: '{self.place(name)}' is not supported with this model.",
            code="unsupported_parameter",
            param=self.place(name),
        )

    def end(self) -> None:
        """Refuses what has not been read."""
        for name in self._raw:
            shown = self.place(name)[:64]
            raise InvalidRequest(
                f"Unrecognized request argument supplied: {shown}", code="unknown_parameter", param=shown
            )


def integer(place: str, value: Any) -> int:
    """A whole number of at most 64 bits; `place` names it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(place, "an integer", value)
    if not -INT_DIGITS_MAX <= value < 2 * INT_DIGITS_MAX:
        raise InvalidRequest(
            f"Invalid '{place}': integer out of range.",
            code="integer_above_max_value" if value > 0 else "integer_below_min_value",
            param=place,
        )
    return value


def wrong_type(place: str, expected: str, value: Any) -> InvalidRequest:
    """The error for a value of another type."""
    return InvalidRequest(
        f"Invalid type for '{place}': expected {expected}, but got {_kind(value)} instead.",
        code="invalid_type",
        param=place,
    )


def empty_array(place: str) -> InvalidRequest:
    """The error for an array without items where one is needed."""
    return InvalidRequest(
        f"Invalid '{place}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        code="empty_array",
        param=place,
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "an integer", float: "a decimal", str: "a string", list: "an array"}
    return kinds.get(type(value), "an object")
