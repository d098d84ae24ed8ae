"""The text side of a Hugging Face model directory: `tokenizer.json`, its settings, and the chat template.

Text becomes ids by the published pipeline itself (the package `tokenizers`). Which ids end an answer is the
union of what all files say: `tokenizer_config.json`, `config.json`, `generation_config.json`. Does not know
weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from text.bpe import byte_alphabet
from text.errors import TemplateError, TextError, VocabularyError
from text.sentencepiece import BLANK
from text.tokenizer import byte_value, scalar_text
from text.vocabulary import TokenType, Vocabulary, end_ids_by_text

MAX_BYTES = 256 << 20
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class JsonTokenizer:
    """Implements `text.tokenizer.Tokenizer` over a `tokenizer.json`."""

    def __init__(self, raw: str, vocabulary: Vocabulary, *, byte_level: bool) -> None:
        self._vocabulary = vocabulary
        self._alphabet = byte_alphabet() if byte_level else None
        self._special = tokenizers.Tokenizer.from_str(raw)
        self._plain = tokenizers.Tokenizer.from_str(raw)
        self._plain.encode_special_tokens = True
        for tokenizer in (self._special, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()

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
        tokenizer = self._special if parse_special else self._plain
        ids: list[int] = list(tokenizer.encode(scalar_text(text), add_special_tokens=False).ids)
        return self._vocabulary.framed(ids) if add_special else ids

    def piece(self, token_id: int) -> bytes:
        if self._type(token_id) in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED):
            return b""
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        text, kind = self._vocabulary.tokens[token_id], self._type(token_id)
        if kind != TokenType.NORMAL:
            return text.encode()
        if self._alphabet is None:
            value = byte_value(text)
            return text.replace(BLANK, " ").encode() if value is None else bytes([value])
        known = [self._alphabet.get(character) for character in text]
        return text.encode() if None in known else bytes(byte for byte in known if byte is not None)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def _type(self, token_id: int) -> int:
        if token_id < 0:
            raise IndexError(f"token id {token_id}")
        return self._vocabulary.types[token_id]


def read_directory(directory: Path) -> tuple[JsonTokenizer, Vocabulary, dict[str, Any]]:
    """Tokenizer, vocabulary, and `config.json`. Raises VocabularyError naming the file."""
    file = directory / "tokenizer.json"
    document = read_json(file)
    config, settings = (
        read_json(directory / "config.json"),
        read_json(directory / "tokenizer_config.json", {}),
    )
    generation = read_json(directory / "generation_config.json", {})
    raw = file.read_text(encoding="utf-8")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(raw)
    except Exception as error:  # the package raises bare exceptions
        raise VocabularyError(f"{file}: {error}") from None
    tokens, types = _tokens(file, tokenizer, document, config)
    by_text = {text: index for index, text in reversed(list(enumerate(tokens)))}
    roles = {role: by_text.get(_text(settings.get(role)) or "") for role in _ROLES}
    first, last = _habits(tokenizer)
    bos = first if first is not None else roles["bos_token"]
    ends = {index for index in (roles["eos_token"], *_ids(config), *_ids(generation)) if index is not None}
    if any(not 0 <= index < len(tokens) for index in ends):
        raise VocabularyError(f"{directory}: eos_token_id {sorted(ends)} leaves the {len(tokens)} tokens")
    vocabulary = Vocabulary(
        model="json",
        pre=None,
        tokens=tokens,
        types=types,
        scores=(),
        merges=(),
        bos_id=bos,
        eos_id=roles["eos_token"] if last is None else last,
        unk_id=roles["unk_token"],
        pad_id=roles["pad_token"],
        add_bos=first is not None,
        add_eos=last is not None,
        add_space_prefix=False,
        end_ids=frozenset(ends) | end_ids_by_text(tokens, types),
    )
    byte_level = "ByteLevel" in json.dumps(document.get("decoder"))
    return JsonTokenizer(raw, vocabulary, byte_level=byte_level), vocabulary, config


def template_sources(directory: Path) -> tuple[str | None, str | None]:
    """The chat template, and the one for tools if there is one of its own."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8"), None
    source = read_json(directory / "tokenizer_config.json", {}).get("chat_template")
    if source is None or isinstance(source, str):
        return source, None
    try:
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default"), named.get("tool_use")
    except (TypeError, KeyError):
        raise TemplateError(f"{directory / 'tokenizer_config.json'}: chat_template is no template") from None


def read_json(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise VocabularyError(f"{file}: larger than {MAX_BYTES} bytes")
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        if missing is None:
            raise VocabularyError(f"{file} is missing") from None
        return missing
    except (ValueError, RecursionError) as error:
        if isinstance(error, TextError):
            raise
        raise VocabularyError(f"{file}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise VocabularyError(f"{file}: no JSON object")
    return value


def _tokens(
    file: Path, tokenizer: tokenizers.Tokenizer, document: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[list[str], list[int]]:
    """Texts and kinds by id, as far as the model's matrices reach."""
    known: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    size = config.get("vocab_size")
    count = max(known.values(), default=-1) + 1
    if type(size) is not int or not 0 < count <= size <= 1 << 24:
        raise VocabularyError(f"{file}: {count} tokens, where config.json gives vocab_size as {size!r}")
    tokens, types = [f"[PAD{i}]" for i in range(size)], [int(TokenType.UNUSED)] * size
    for text, index in known.items():
        tokens[index], types[index] = text, TokenType.NORMAL
    added = document.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        place = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(place, int) and 0 <= place < size:
            types[place] = TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
    return tokens, types


def _habits(tokenizer: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """What the pipeline puts before and after every text."""
    bare = list(tokenizer.encode("a", add_special_tokens=False).ids)
    whole = list(tokenizer.encode("a", add_special_tokens=True).ids)
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    after = whole[at + len(bare) :]
    return (whole[0] if at else None), (after[-1] if after else None)


def _text(value: Any) -> str | None:
    """A token, or an object that holds one."""
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _ids(config: Mapping[str, Any]) -> Sequence[int]:
    value = config.get("eos_token_id")
    return [index for index in (value if isinstance(value, list) else [value]) if type(index) is int]
