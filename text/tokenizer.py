"""What a tokenizer is for the rest of the mesh, and what all tokenizers made from a GGUF vocabulary share.

`VocabularyTokenizer` cuts added tokens out of the text, adds begin and end tokens, and gives the bytes of
each token. How the plain text between added tokens becomes ids is left to an `Encoder` (`text/bpe.py`,
`text/sentencepiece.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from text.added_tokens import AddedTokens
from text.vocabulary import TokenType, Vocabulary


class Tokenizer(Protocol):
    """Text to ids, and ids to bytes. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def add_bos(self) -> bool:
        """Whether `encode(add_special=True)` begins with `bos_id`."""
        ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`.

        `add_special`: with the begin (and end) token, if the model has that habit; never a second one.
        `parse_special`: the text of a control token becomes that token; otherwise it is plain text.
        """
        ...

    def piece(self, token_id: int) -> bytes:
        """Bytes that the token adds to the output, maybe a part of a character; b"" for control tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """As `piece`, but a control token gives its name. For logprobs."""
        ...

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where the token holds half a character. For logprobs."""
        ...


class Encoder(Protocol):
    """Ids of plain text, and the bytes of the tokens that stand for text."""

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of a stretch without added tokens; `first` where it begins the whole text."""
        ...

    def text_bytes(self, token: str) -> bytes:
        """The bytes that a NORMAL token stands for."""
        ...


class VocabularyTokenizer:
    """A tokenizer over a `Vocabulary`. Ids outside of it raise `IndexError`."""

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder, *, prepare: Callable[[str], str]) -> None:
        """`prepare` is applied to the text, and to added tokens, before these are looked for in it."""
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._prepare = prepare
        always = _prepared(vocabulary.texts(TokenType.USER_DEFINED), prepare)
        control = _prepared(vocabulary.texts(TokenType.CONTROL, TokenType.UNKNOWN), prepare)
        self._user_defined = AddedTokens(always)
        self._all_added = AddedTokens({**always, **control})
        self._bytes: list[bytes | None] = [None] * len(vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def add_bos(self) -> bool:
        return self._vocabulary.add_bos

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids: list[int] = []
        added = self._all_added if parse_special else self._user_defined
        for part in added.split(self._prepare(scalar_text(text))):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encoder.encode_plain(part, first=not ids)
        return self._vocabulary.framed(ids) if add_special else ids

    def piece(self, token_id: int) -> bytes:
        if self._vocabulary.types[_checked(token_id)] in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b""
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes[_checked(token_id)]
        if known is None:
            known = self._bytes[token_id] = self._render(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def _render(self, token_id: int) -> bytes:
        text, kind = self._vocabulary.tokens[token_id], self._vocabulary.types[token_id]
        if kind == TokenType.NORMAL:
            return self._encoder.text_bytes(text)
        if kind == TokenType.BYTE and (value := byte_value(text)) is not None:
            return bytes([value])
        return text.encode()


def byte_value(token: str) -> int | None:
    """The byte that a token such as `<0x0A>` stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def scalar_text(text: str) -> str:
    """`text` as Unicode scalar values: surrogate pairs are joined, lone surrogates become U+FFFD.

    JSON can carry them, no encoding of Unicode can.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _prepared(texts: dict[str, int], prepare: Callable[[str], str]) -> dict[str, int]:
    return {prepare(text): token_id for text, token_id in texts.items()}


def _checked(token_id: int) -> int:
    if token_id < 0:  # a negative index would quietly count from the end
        raise IndexError(f"token id {token_id}")
    return token_id
