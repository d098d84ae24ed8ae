"""Tokenizers that come as a `tokenizer.json`, as encoder models have them.

The library that the models' own publishers use reads the file; padding and cutting, which
some files ask for, are switched off, because whoever asks for a text gets all of it. Does
not know what the ids are for.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from text.errors import VocabularyError
from text.tokenizer import scalar_text


class JsonTokenizer:
    """See `text.tokenizer.Tokenizer`. A piece that continues a word has no mark in its bytes."""

    bos_id: int | None = None
    add_bos: bool = False

    def __init__(self, path: Path) -> None:
        """Raises VocabularyError."""
        try:
            self._fast = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises Exception itself.
            raise VocabularyError(f"{path}: {error}") from error
        self._fast.no_padding()
        self._fast.no_truncation()
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(
            token_id for token_id, token in self._fast.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids: list[int] = self._fast.encode(scalar_text(text), add_special_tokens=add_special).ids
        return ids

    def piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise IndexError(f"token id {token_id}")
        plain: str = token.removeprefix("##")
        return plain.encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode()
