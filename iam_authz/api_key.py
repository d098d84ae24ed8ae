"""The text of an API key: `kvm_<public id>_<secret><checksum>`.

The secret is 43 base62 characters (256 bits); the checksum, six more, lets a
scanner or a server tell a real key from a typo without any database. The public
id may be logged. This module knows no database and no organisation.
"""

from __future__ import annotations

import re
import secrets
import zlib
from dataclasses import dataclass, field

PREFIX = "kvm"
ID_LENGTH = 12
SECRET_LENGTH = 43
CHECKSUM_LENGTH = 6

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHAPE = re.compile(
    rf"{PREFIX}_([0-9A-Za-z]{{{ID_LENGTH}}})_[0-9A-Za-z]{{{SECRET_LENGTH}}}([0-9A-Za-z]{{{CHECKSUM_LENGTH}}})"
)


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key as its holder has it. `text` is the secret: never log it."""

    id: str
    text: str = field(repr=False)


def new_key() -> KeyText:
    """A fresh key."""
    public_id = _random(ID_LENGTH)
    body = f"{PREFIX}_{public_id}_{_random(SECRET_LENGTH)}"
    return KeyText(public_id, body + _checksum(body))


def looks_like_key(text: str) -> bool:
    """Whether the holder meant an API key of this mesh, right or wrong."""
    return text.startswith(PREFIX + "_")


def parse_key(text: str) -> KeyText | None:
    """The key in `text`, or None when it is not one, or not whole."""
    match = _SHAPE.fullmatch(text)
    if match is None or _checksum(text[:-CHECKSUM_LENGTH]) != match[2]:
        return None
    return KeyText(match[1], text)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode("ascii"))
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        value, digit = divmod(value, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
