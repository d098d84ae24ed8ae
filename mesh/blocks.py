"""Names of KV blocks: who may share a page with whom.

A block is `PAGE_TOKENS` consecutive tokens of one sequence. Its id covers its
tokens, everything before them (through the parent's id) and its extras (media,
adapters). Only the root is keyed, by the salt of the verified organisation: two
organisations never have an id in common, and whoever continues a chain needs
its last id and not the salt.

Every field is hashed with a one-byte tag and an eight-byte length, so that no
two different inputs have the same encoding. This module does not know where
pages lie or who asks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

PAGE_TOKENS = 16
ID_BYTES = 16

# BLAKE2b's personalisation separates the three uses of the hash.
_ROOT = b"kvmesh root 1"
_BLOCK = b"kvmesh block 1"
_CONTENT = b"kvmesh content 1"
_KEY_LIMIT_BYTES = 64

_TOKENS_FIELD = struct.Struct("<cQ")
_NAME, _VALUE, _TOKENS, _PARENT, _COUNT = b"n", b"v", b"t", b"p", b"c"

_U32 = next(code for code in "IL" if array(code).itemsize == 4)


def _field(tag: bytes, value: bytes) -> bytes:
    return _TOKENS_FIELD.pack(tag, len(value)) + value


def root_id(salt: bytes, fingerprint: bytes) -> bytes:
    """The parent of the first block of every chain of one organisation and model.

    `salt` is secret and must not be empty; `fingerprint` comes from
    `content_fingerprint`. 16 bytes.
    """
    if not salt:
        raise ValueError("a root needs the organisation's salt")
    # BLAKE2b zero-pads keys, so a salt and the same salt with trailing zeros would be one key.
    key = salt if len(salt) == _KEY_LIMIT_BYTES else blake2b(salt, digest_size=_KEY_LIMIT_BYTES).digest()
    return blake2b(_field(_VALUE, fingerprint), digest_size=ID_BYTES, key=key, person=_ROOT).digest()


def block_id(parent: bytes, tokens: Sequence[int], extras: Sequence[tuple[str, bytes]] = ()) -> bytes:
    """The id of the block that holds `tokens` after `parent`. 16 bytes.

    `extras` are (name, value) pairs whose order counts. Raises ValueError for a
    parent that is no id and for token ids outside 0 .. 2^32 - 1.
    """
    if len(parent) != ID_BYTES:
        raise ValueError(f"a parent id has {ID_BYTES} bytes, not {len(parent)}")
    return _block(parent, _packed(tokens), _encoded(extras))


def chain(
    root: bytes,
    tokens: Sequence[int],
    page_tokens: int = PAGE_TOKENS,
    extras: Sequence[tuple[str, bytes]] = (),
) -> list[bytes]:
    """The ids of all whole blocks of `tokens`: len(tokens) // page_tokens of them."""
    if page_tokens < 1:
        raise ValueError(f"a page holds at least one token, not {page_tokens}")
    if len(root) != ID_BYTES:
        raise ValueError(f"a root id has {ID_BYTES} bytes, not {len(root)}")
    packed = memoryview(_packed(tokens))
    encoded = _encoded(extras)
    step = page_tokens * 4
    ids: list[bytes] = []
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = _block(parent, packed[start : start + step], encoded)
        ids.append(parent)
    return ids


def content_fingerprint(
    weights_digest: bytes, kv_dtype: str, page_tokens: int, rope: str, numerics_id: str
) -> bytes:
    """Names everything that decides the bits of a page apart from the tokens. 16 bytes."""
    parts = (
        weights_digest,
        kv_dtype.encode(),
        page_tokens.to_bytes(8, "little"),
        rope.encode(),
        numerics_id.encode(),
    )
    digest = blake2b(digest_size=ID_BYTES, person=_CONTENT)
    for part in parts:
        digest.update(_field(_VALUE, part))
    return digest.digest()


def _block(parent: bytes, packed: bytes | memoryview, extras: bytes) -> bytes:
    digest = blake2b(_field(_PARENT, parent), digest_size=ID_BYTES, person=_BLOCK)
    digest.update(_TOKENS_FIELD.pack(_TOKENS, len(packed)))
    digest.update(packed)
    digest.update(extras)
    return digest.digest()


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        words = array(_U32, tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are whole numbers from 0 to 2^32 - 1: {error}") from None
    return _little_endian(words)


def _little_endian(words: array[int]) -> bytes:
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        words.byteswap()
    return words.tobytes()


def _encoded(extras: Sequence[tuple[str, bytes]]) -> bytes:
    parts = [_TOKENS_FIELD.pack(_COUNT, len(extras))]
    for name, value in extras:
        parts.append(_field(_NAME, name.encode()))
        parts.append(_field(_VALUE, value))
    return b"".join(parts)
