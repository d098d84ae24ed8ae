"""Byte-level BPE from metadata: patterns by name, added tokens, begin tokens, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from tests.text import gguf_builder as build
from tests.text.small_bpe import BLANK_LINE, BOS, CONTROL, END, GO, MERGES, USER_DEFINED, metadata
from text import TextModel, Tokenizer, VocabularyError, load_text_model
from text.bpe import PIPELINES


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
def test_the_pattern_follows_the_name(
    tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:  # B82
    tokenizer = load(tmp_path, pre=pre).tokenizer
    assert pieces(tokenizer, text) == expected


def test_an_unknown_pattern_is_an_error(tmp_path: Path) -> None:  # B82
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
) -> None:  # B80
    tokenizer = load(tmp_path, **changes).tokenizer
    plain = tokenizer.encode("a", add_special=False, parse_special=True)
    assert plain == [ord("a")]
    bos = changes.get("bos_token_id", BOS)
    expected = [bos] * begins + plain + [END] * ends
    assert tokenizer.encode("a", add_special=True, parse_special=True) == expected
    assert tokenizer.add_bos is begins


def test_never_two_begin_tokens(tmp_path: Path) -> None:  # B35
    tokenizer = load(tmp_path, add_bos_token=True).tokenizer
    assert tokenizer.encode("<|bos|>abc", add_special=True, parse_special=True)[:2] == [BOS, 257]
    # As plain text it is no begin token, so the real one is added.
    assert tokenizer.encode("<|bos|>", add_special=True, parse_special=False)[0] == BOS
    assert len(tokenizer.encode("<|bos|>", add_special=True, parse_special=False)) == 8


def test_added_tokens(tmp_path: Path) -> None:  # B79
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


def test_same_ids_as_the_reference_around_added_tokens(tmp_path: Path) -> None:  # B79
    """GGUF has no flags for stripping or single words: an added token is matched as it stands."""
    given = metadata()
    tokens, types = given["tokenizer.ggml.tokens"], given["tokenizer.ggml.token_type"]
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in MERGES)]
    reference = RustTokenizer(BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=pairs))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    reference.add_tokens(
        [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    tokenizer = load(tmp_path).tokenizer
    draw = random.Random(79)
    atoms = [
        "<|go|>",
        "<|go|>user",
        "\n\n",
        "\n",
        " ",
        "  ",
        "a",
        "ab",
        "abc",
        "123",
        "é",
        "<|",
        "<|end|>",
        "|>",
    ]
    for _ in range(3000):
        text = "".join(draw.choices(atoms, k=draw.randint(1, 10)))
        ours = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ours == reference.encode(text, add_special_tokens=False).ids, text


def test_end_tokens_are_united(tmp_path: Path) -> None:  # B21
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


def test_lone_surrogates_do_no_harm(tmp_path: Path) -> None:  # B29
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
