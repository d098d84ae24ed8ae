"""Which names and values an operator may use. Refusals name the field.

It knows the shape of a name, not whether the thing exists.
"""

from __future__ import annotations

import re

from mesh.errors import InvalidRequest

ANY_MODEL = "*"
MAX_KEY_MODELS = 64
# The list travels in every identity token, and a token has a size limit.
MAX_KEY_MODELS_CHARS = 1024
MAX_LIFETIME_S = 10 * 366 * 86_400

_ORGANISATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._:-]*)*")
_MODEL_LENGTH = 128


def organisation(value: str, param: str = "organisation") -> str:
    """An organisation id: letters, digits, `.`, `_`, `-`; 64 at most."""
    if _ORGANISATION.fullmatch(value) is None:
        raise InvalidRequest(
            "An organisation id is 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit.",
            code="invalid_name",
            param=param,
        )
    return value


def model(value: str, param: str = "model") -> str:
    """A model name as clients send it: path-like parts joined by single slashes; 128 at most."""
    if len(value) > _MODEL_LENGTH or _MODEL.fullmatch(value) is None:
        raise InvalidRequest(
            f"A model name is 1 to {_MODEL_LENGTH} letters, digits, '.', '_', ':' or '-', in parts joined by "
            "single slashes; each part begins with a letter or digit.",
            code="invalid_name",
            param=param,
        )
    return value


def grant_model(value: str) -> str:
    """A model name, or "*" for all."""
    return value if value == ANY_MODEL else model(value, "grant.model")


def label(value: str, param: str, longest: int = 100) -> str:
    """Free text that people read: printable, not blank, no line breaks."""
    if not value.strip() or len(value) > longest or not value.isprintable():
        raise InvalidRequest(
            f"{param} must be 1 to {longest} printable characters.", code="invalid_value", param=param
        )
    return value


def lifetime(seconds: int | None) -> int | None:
    """A key's lifetime in seconds, or None for one that does not expire."""
    if seconds is not None and not 0 < seconds <= MAX_LIFETIME_S:
        raise InvalidRequest(
            f"expires_in_s must be between 1 and {MAX_LIFETIME_S}; without it a key does not expire.",
            code="invalid_value",
            param="expires_in_s",
        )
    return seconds


def key_models(values: list[str]) -> tuple[str, ...]:
    """A key's own limit on models, without duplicates."""
    if len(values) > MAX_KEY_MODELS:
        raise InvalidRequest(
            f"A key names {MAX_KEY_MODELS} models at most.", code="invalid_value", param="models"
        )
    if sum(map(len, values)) > MAX_KEY_MODELS_CHARS:
        raise InvalidRequest(
            f"The names of a key's models have {MAX_KEY_MODELS_CHARS} characters together at most.",
            code="invalid_value",
            param="models",
        )
    return tuple(dict.fromkeys(model(value, "models") for value in values))
