"""Byte-level BPE from metadata: patterns by name, added tokens, begin tokens, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.text import gguf_builder as build
from text import TextModel, Tokenizer, VocabularyError, load_text_model
from text.bpe import PIPELINES

CONTROL, USER_DEFINED = 3, 4
MERGES = ["a b", "ab c", "1 2", "12 3", "Ġ a", "Ġ Ġ", "e Ì", "eÌ ģ", "Ã ©"]


def alphabet() -> list[str]:
    """The 256 characters of byte-level vocabularies, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def metadata(**changes: Any) -> dict[str, Any]:
    """A small model: bytes are ids 0 to 255, then the merged tokens, then a few added ones."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    added = ["<|bos|>", "<|end|>", "<|go|>", "\n\n"]
    out = {
        "general.architecture": "llama",
        "general.name": "Small",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet(), *merged, *added],
        "tokenizer.ggml.token_type": [1] * (256 + len(merged))
        + [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 256 + len(merged),
        "tokenizer.ggml.eos_token_id": 257 + len(merged),
    }
    for name, content in changes.items():
        key = f"tokenizer.ggml.{name}"
        if content is None:
            del out[key]
        else:
            out[key] = content
    return out


BOS, END, GO, BLANK_LINE = range(256 + len(MERGES), 260 + len(MERGES))


def load(tmp_path: Path, **changes: Any) -> TextModel:
    path = tmp_path / "small.gguf"
    path.write_bytes(build.metadata_file(metadata(**changes)))
    return load_text_model(str(path))


def pieces(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    return [tokenizer.token_bytes(token_id).decode("latin-1") for token_id in ids]


def test_what_is_loaded(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert (model.name, model.context_length, model.vocab_size) == ("Small", 512, 260 + len(MERGES))
    assert model.end_ids == {END}
    assert model.chat_template is None
    assert model.tokenizer.bos_id == BOS


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "abc12345", ["abc", "123", "4", "5"]),
        ("smollm", "abc12345", ["abc", "1", "2", "3", "4", "5"]),
        ("qwen2", "abc12345", ["abc", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "abc12345", ["abc", "123", "4", "5"]),
        ("llama-bpe", "4123", ["4", "12", "3"]),  # at most three digits together
        ("gpt-2", "4123", ["4", "123"]),
        ("gpt-2", "   a", ["  ", " a"]),
        ("gpt-2", "cafe\u0301", ["c", "a", "f", "e", "\xcc", "\x81"]),  # a mark is no letter
        ("qwen2", "cafe\u0301", ["c", "a", "f", "\xc3\xa9"]),  # NFC, as the published tokenizer does
    ],
)
def test_the_pattern_follows_the_name(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = load(tmp_path, pre=pre).tokenizer
    assert pieces(tokenizer, text) == expected


def test_an_unknown_pattern_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"small\.gguf.*pre is 'sparkling'.*qwen2"):
        load(tmp_path, pre="sparkling")
    assert "sparkling" not in PIPELINES


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": True, "bos_token_id": END}, True, False),
        ({"add_eos_token": True}, False, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
    ],
)
def test_begin_and_end_as_the_file_says(
    tmp_path: Path, changes: dict[str, Any], begins: bool, ends: bool
) -> None:
    tokenizer = load(tmp_path, **changes).tokenizer
    plain = tokenizer.encode("a", add_special=False, parse_special=True)
    assert plain == [ord("a")]
    bos = changes.get("bos_token_id", BOS)
    expected = [bos] * begins + plain + [END] * ends
    assert tokenizer.encode("a", add_special=True, parse_special=True) == expected
    assert tokenizer.add_bos is begins


def test_never_two_begin_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, add_bos_token=True).tokenizer
    assert tokenizer.encode("<|bos|>abc", add_special=True, parse_special=True)[:2] == [BOS, 257]
    # As plain text it is no begin token, so the real one is added.
    assert tokenizer.encode("<|bos|>", add_special=True, parse_special=False)[0] == BOS
    assert len(tokenizer.encode("<|bos|>", add_special=True, parse_special=False)) == 8


def test_added_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path).tokenizer
    for parse_special in (False, True):
        assert pieces(tokenizer, "<|go|>abc", parse_special) == ["<|go|>", "abc"]
        assert pieces(tokenizer, "<|go|> a", parse_special) == ["<|go|>", " a"]
        assert pieces(tokenizer, "a<|go|>b", parse_special) == ["a", "<|go|>", "b"]
        assert pieces(tokenizer, "a\n\nb\n", parse_special) == ["a", "\n\n", "b", "\n"]
    assert tokenizer.encode("<|end|>", add_special=False, parse_special=True) == [END]
    assert END not in tokenizer.encode("<|end|>", add_special=False, parse_special=False)
    assert tokenizer.piece(END) == b""
    assert tokenizer.token_text(END) == "<|end|>"
    assert tokenizer.piece(GO) == b"<|go|>"
    assert tokenizer.piece(BLANK_LINE) == b"\n\n"


def test_end_tokens_are_united(tmp_path: Path) -> None:
    tokens = metadata()["tokenizer.ggml.tokens"]
    types = metadata()["tokenizer.ggml.token_type"]
    more = ["<|im_end|>", "<|eot_id|>", "</s>", "<|endoftext|>", "<turn>"]
    first = len(tokens)
    model = load(
        tmp_path,
        tokens=[*tokens, *more],
        token_type=[*types, CONTROL, CONTROL, CONTROL, 1, CONTROL],
        eot_token_id=first + 4,
    )
    # Not "</s>", which the file does not name as an end; not "<|endoftext|>", which is ordinary text here.
    assert model.end_ids == {END, first, first + 1, first + 4}
    assert first + 2 in load(tmp_path, tokens=[*tokens, *more], token_type=[*types, 3, 3, 3, 1, 3],
                             eos_token_id=first + 2).end_ids  # fmt: skip


def test_messages_of_one_turn_do_not_end_it(tmp_path: Path) -> None:
    tokens, types = metadata()["tokenizer.ggml.tokens"], metadata()["tokenizer.ggml.token_type"]
    first = len(tokens)
    model = load(
        tmp_path,
        tokens=[*tokens, "<|return|>", "<|call|>", "<|start|>"],
        token_type=[*types, CONTROL, CONTROL, CONTROL],
        eos_token_id=first,
    )
    assert model.end_ids == {first, first + 1}  # "<|end|>" closes one message of several


def test_without_types_only_named_tokens_are_control(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, token_type=None).tokenizer
    assert tokenizer.encode("<|bos|>", add_special=False, parse_special=True) == [BOS]
    assert len(tokenizer.encode("<|go|>", add_special=False, parse_special=True)) > 1


def test_lone_surrogates_do_no_harm(tmp_path: Path) -> None:
    tokenizer = load(tmp_path).tokenizer
    assert "".join(pieces(tokenizer, "a\ud800")) == "a\ufffd".encode().decode("latin-1")
    assert "".join(pieces(tokenizer, "\ud83d\ude42")) == "🙂".encode().decode("latin-1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a"]}, "merge 0"),
        ({"merges": ["a b", "a z"]}, "merge 1"),
        ({"model": "wordpiece"}, "model is 'wordpiece'"),
        ({"model": None}, "no tokenizer"),
        ({"tokens": None}, "no tokenizer"),
        ({"tokens": [1, 2]}, "tokens is no list"),
        ({"token_type": [1, 2]}, "2 entries"),
        ({"eos_token_id": 1 << 20}, "eos_token_id"),
        ({"bos_token_id": True}, "bos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token"),
        ({"pre": 7}, "pre is no string"),
    ],
)
def test_bad_vocabularies_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        load(tmp_path, **changes)
