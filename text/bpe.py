"""Byte-level BPE (`tokenizer.ggml.model = gpt2`): the published pipelines, rebuilt from the file.

The file names its pre-tokenizer only (`tokenizer.ggml.pre`); the patterns behind the names are kept here. An
unknown name is an error, since a wrong pattern gives plausible but wrong ids. Merging is done by the Rust
`tokenizers` library, which gives exactly the published ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from text.errors import VocabularyError
from text.tokenizer import VocabularyTokenizer
from text.vocabulary import TokenType, Vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What happens to plain text before merging."""

    pattern: str | None  # None: the pattern of GPT-2, which is built into ByteLevel
    split_digits: bool = False  # each digit on its own, before the pattern
    nfc: bool = False
    whole_words: bool = False  # a stretch that is a token itself is taken without merging


_GPT2 = Pipeline(pattern=None)
_SMOLLM = Pipeline(pattern=None, split_digits=True)
_QWEN2 = Pipeline(pattern=_WORDS.format(digits=r"\p{N}"), nfc=True)
_LLAMA3 = Pipeline(pattern=_WORDS.format(digits=r"\p{N}{1,3}"), whole_words=True)

PIPELINES: dict[str, Pipeline] = {
    "default": _GPT2,
    "gpt2": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def bpe_tokenizer(vocabulary: Vocabulary) -> VocabularyTokenizer:
    """Raises `VocabularyError` for an unknown pre-tokenizer, or merges that do not fit the tokens."""
    name = vocabulary.pre or "default"
    pipeline = PIPELINES.get(name)
    if pipeline is None:
        known = ", ".join(sorted(PIPELINES))
        raise VocabularyError(f"tokenizer.ggml.pre is {name!r}; known are {known}")
    return VocabularyTokenizer(vocabulary, _BpeEncoder(vocabulary, pipeline), prepare=_unchanged)


class _BpeEncoder:
    def __init__(self, vocabulary: Vocabulary, pipeline: Pipeline) -> None:
        # Control tokens stay out of reach of plain text; they are only ever matched whole.
        mergeable = vocabulary.texts(TokenType.NORMAL, TokenType.USER_DEFINED)
        model = BPE(
            vocab=mergeable,
            merges=_merges(vocabulary, mergeable),
            ignore_merges=pipeline.whole_words,
        )
        self._rust = RustTokenizer(model)
        if pipeline.nfc:
            self._rust.normalizer = NFC()
        self._rust.pre_tokenizer = _pre_tokenizer(pipeline)
        self._bytes_of = byte_alphabet()

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        # The batch call, because it lets other threads run and skips offsets.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def text_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._bytes_of[char] for char in token)
        except KeyError:  # a token that was added as plain text
            return token.encode()


def _merges(vocabulary: Vocabulary, mergeable: dict[str, int]) -> list[tuple[str, str]]:
    if not vocabulary.merges:
        raise VocabularyError("tokenizer.ggml.merges is missing")
    known = set(vocabulary.tokens)
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(vocabulary.merges):
        left, blank, right = merge.partition(" ")
        if not (left and blank and right) or not known.issuperset((left, right, left + right)):
            raise VocabularyError(f"tokenizer.ggml.merges: merge {index} ({merge!r}) does not fit the tokens")
        if left in mergeable and right in mergeable and left + right in mergeable:
            merges.append((left, right))
    return merges


def _pre_tokenizer(pipeline: Pipeline) -> PreTokenizer:
    steps: list[PreTokenizer] = []
    if pipeline.split_digits:
        steps.append(Digits(individual_digits=True))
    if pipeline.pattern is not None:
        steps.append(Split(Regex(pipeline.pattern), "isolated"))
    steps.append(ByteLevel(add_prefix_space=False, use_regex=pipeline.pattern is None))
    return Sequence(steps)


def byte_alphabet() -> dict[str, int]:
    """The character that GPT-2's byte-level vocabularies write for each byte.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _unchanged(text: str) -> str:
    return text
