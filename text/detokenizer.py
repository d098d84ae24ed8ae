"""Turns a stream of token ids into text, piece by piece, and never gives out half a character.

Tokens hold bytes, and a character may be spread over several of them. Bytes that can still become a character
are held back; bytes that cannot are given out as U+FFFD as soon as that is certain. A character that is still
incomplete when the stream ends is dropped, so text cut by a token limit ends before the character it fell
into. The result depends on the bytes alone, not on how the ids were spread over calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Pieces(Protocol):
    """All that detokenising needs of a tokenizer."""

    def piece(self, token_id: int, /) -> bytes: ...


class Detokenizer:
    """The text of one generated sequence."""

    def __init__(self, tokenizer: Pieces) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; maybe empty."""
        piece = self._tokenizer.piece
        return self._decoder.decode(b"".join([piece(token_id) for token_id in ids]))

    def flush(self) -> str:
        """Ends the sequence and drops an incomplete character; so nothing is left to give out: ""."""
        self._decoder.reset()
        return ""


def detokenize(tokenizer: Pieces, ids: Iterable[int]) -> str:
    """The text of a whole sequence, the same as a `Detokenizer` gives in pieces."""
    stream = Detokenizer(tokenizer)
    return stream.push(ids) + stream.flush()
