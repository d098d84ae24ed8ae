"""The vocabulary of a GGUF file: its tokens, their kinds, and those with a role (begin, end, unknown, pad).

Reads `tokenizer.ggml.*` and checks it. Follows the file: a token is a control token because the file says so,
never because of how it is spelled. Does not know how text becomes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from text.errors import VocabularyError

_PREFIX = "tokenizer.ggml."

# Tokens that end a generation wherever they exist as control tokens: end of turn, of text, of message, and
# those that begin the next file or repository in code models. Deliberately without "</s>": some vocabularies
# hold it as ordinary text (it is HTML too), and a file that means it as an end names it as its
# `eos_token_id`.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<eos>", "<end_of_utterance>",
        "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<fim-repo>",
        "<REPO>", "<reponame>", "<|repo_name|>", "<|file_sep|>",
    }
)  # fmt: skip
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ROLE_KEYS = ("bos", "eos", "eot", "eom", "unknown", "padding")


class TokenType(IntEnum):
    """Kinds of tokens as GGUF files number them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, with what the file says about them."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SentencePiece)
    pre: str | None  # name of the pre-tokenizer
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]  # empty where the file has none
    merges: Sequence[str]  # empty where the file has none
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    end_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self, *types: TokenType) -> dict[str, int]:
        """Text -> id of all tokens of these types; the lowest id where a text appears twice."""
        out: dict[str, int] = {}
        for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in types and text:
                out.setdefault(text, index)
        return out

    def framed(self, ids: list[int]) -> list[int]:
        """`ids` with the begin and end tokens that belong to every text, where they are not there yet."""
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Raises `VocabularyError` where a key is missing, has the wrong type, or contradicts another one."""
        read = _Reader(metadata)
        model = read.text("model")
        tokens = read.items("tokens", str)
        if model is None or not tokens:
            raise VocabularyError(f"the file has no tokenizer ({_PREFIX}model and {_PREFIX}tokens)")
        sentencepiece = model == "llama"
        pre = read.text("pre")
        # What these kinds of tokenizers have always meant where the file is silent.
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if sentencepiece else {}
        ids = {
            role: read.token_id(role, len(tokens), defaults.get(role)) for role in (*_ROLE_KEYS, *_END_KEYS)
        }
        types = read.items("token_type", int, len(tokens))
        if not types:
            marked = {ids[role] for role in _ROLE_KEYS}
            types = [TokenType.CONTROL if i in marked else TokenType.NORMAL for i in range(len(tokens))]
        default_bos = sentencepiece or pre in ("llama-bpe", "llama3", "llama-v3")
        vocabulary = cls(
            model=model,
            pre=pre,
            tokens=tokens,
            types=types,
            scores=read.items("scores", float, len(tokens)),
            merges=read.items("merges", str),
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            unk_id=ids["unknown"],
            pad_id=ids["padding"],
            add_bos=read.flag("add_bos_token", default_bos and ids["bos"] is not None),
            add_eos=read.flag("add_eos_token", False),
            add_space_prefix=read.flag("add_space_prefix", sentencepiece),
            end_ids=_end_ids(tokens, types, ids),
        )
        for flag, role in ((vocabulary.add_bos, "bos"), (vocabulary.add_eos, "eos")):
            if flag and ids[role] is None:
                raise VocabularyError(f"{_PREFIX}add_{role}_token is set without {_PREFIX}{role}_token_id")
        return vocabulary


def _end_ids(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]) -> frozenset[int]:
    found = {index for role in _END_KEYS if (index := ids[role]) is not None}
    known = _known_ends(tokens, types)
    # In the format with <|return|> and <|call|>, <|end|> only closes one of several messages of a turn.
    if "<|return|>" in known and "<|call|>" in known and "<|end|>" in known:
        between = known.pop("<|end|>")
        if between != ids["eos"]:
            found.discard(between)
    return frozenset(found | set(known.values()))


def _known_ends(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    return {
        text: index
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.CONTROL and text in _END_TEXTS
    }


def end_ids_by_text(tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    """The control tokens that end a generation wherever they exist."""
    known = _known_ends(tokens, types)
    if "<|return|>" in known and "<|call|>" in known:
        known.pop("<|end|>", None)
    return frozenset(known.values())


class _Reader:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, key: str) -> str | None:
        value = self._metadata.get(_PREFIX + key)
        if value is not None and not isinstance(value, str):
            raise VocabularyError(f"{_PREFIX}{key} is no string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise VocabularyError(f"{_PREFIX}{key} is no truth value")
        return value

    def items(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        value = self._metadata.get(_PREFIX + key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise VocabularyError(f"{_PREFIX}{key} is no list of {kind.__name__}")
        if value and length is not None and len(value) != length:
            raise VocabularyError(f"{_PREFIX}{key} has {len(value)} entries for {length} tokens")
        return value

    def token_id(self, role: str, count: int, default: int | None) -> int | None:
        key = f"{_PREFIX}{role}_token_id"
        value = self._metadata.get(key, default)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < count:
            if key not in self._metadata:
                return None
            raise VocabularyError(f"{key} is {value!r}, which is no id of the {count} tokens")
        return value
