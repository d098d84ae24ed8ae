"""SentencePiece's BPE: the fast encoder against the plain algorithm, and the rules around it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from tests.text import gguf_builder as build
from text import VocabularyError, load_text_model
from text.sentencepiece import sentencepiece_tokenizer
from text.tokenizer import Tokenizer
from text.vocabulary import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "aa", "aaa", "ca", "b▁", "cab"]


def metadata(
    words: list[str], scores: list[float], *, with_bytes: bool = True, **more: Any
) -> dict[str, Any]:
    tokens, types, all_scores = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL], [0.0] * 3
    if with_bytes:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        types += [BYTE] * 256
        all_scores += [0.0] * 256
    tokens += [*words, "\n\n", "  "]
    types += [NORMAL] * len(words) + [USER_DEFINED] * 2
    all_scores += [*scores, -1000.0, -1000.0]
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": all_scores,
        "tokenizer.ggml.add_space_prefix": False,
        **{f"tokenizer.ggml.{key}": content for key, content in more.items()},
    }


def tokenizer_of(words: list[str], scores: list[float] | None = None, **more: Any) -> Tokenizer:
    ranked = [-float(i) for i in range(len(words))] if scores is None else scores
    return sentencepiece_tokenizer(Vocabulary.from_metadata(metadata(words, ranked, **more)))


def pieces(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, parse_special=special)
    return [tokenizer.token_text(token_id) for token_id in ids]


def naive(words: dict[str, float], text: str) -> list[str]:
    """Joins the best-scored pair, the leftmost of equals, over the whole text."""
    symbols = list(text)
    while True:
        pairs = [
            (-words[left + right], i)
            for i, (left, right) in enumerate(pairwise(symbols))
            if left + right in words
        ]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(
    st.lists(st.text("abc▁", min_size=2, max_size=5), min_size=1, max_size=12, unique=True),
    st.lists(st.integers(-6, 0), min_size=12, max_size=12),
    st.text("abc▁", max_size=60),
)
def test_agrees_with_the_plain_algorithm(longer: list[str], ranks: list[int], text: str) -> None:
    words = [*"abc▁", *longer]
    scores = [-100.0] * 4 + [float(rank) for rank in ranks[: len(longer)]]
    tokenizer = tokenizer_of(words, scores)
    while "▁▁" in text:  # two blanks are a user-defined token here, which is cut out before
        text = text.replace("▁▁", "▁")
    expected = [symbol.replace("▁", " ") for symbol in naive(dict(zip(words, scores, strict=True)), text)]
    assert pieces(tokenizer, text) == expected
    assert pieces(tokenizer, text) == expected  # now from memory


def test_long_stretches_take_the_same_way() -> None:
    tokenizer = tokenizer_of(WORDS)
    text = "abca" * 50
    assert pieces(tokenizer, text) == naive({w: -float(i) for i, w in enumerate(WORDS)}, text)


def test_unknown_characters_become_bytes() -> None:
    tokenizer = tokenizer_of(WORDS)
    ids = tokenizer.encode("aü", add_special=False, parse_special=False)
    assert [tokenizer.piece(token_id) for token_id in ids] == [b"a", b"\xc3", b"\xbc"]


def test_without_bytes_a_run_of_unknown_characters_is_one_token() -> None:
    tokenizer = tokenizer_of(WORDS, with_bytes=False)
    assert tokenizer.encode("üöab€", add_special=False, parse_special=False)[0] == 0
    assert pieces(tokenizer, "üöab€") == ["<unk>", "ab", "<unk>"]
    assert tokenizer.piece(0) == b""


def test_the_blank_in_front_is_only_for_text_that_comes_first() -> None:
    tokenizer = tokenizer_of(WORDS, add_space_prefix=True)
    assert pieces(tokenizer, "ab", special=True) == [" ab"]
    assert pieces(tokenizer, "<s>ab", special=True) == ["<s>", "ab"]
    assert pieces(tokenizer, "a<s>ab", special=True) == [" a", "<s>", "ab"]
    assert pieces(tokenizer, "", special=True) == []
    assert pieces(tokenizer_of(WORDS), "ab") == ["ab"]


def test_text_after_a_control_token() -> None:  # B78
    tokenizer = tokenizer_of(WORDS)
    assert pieces(tokenizer, "<s> ab", special=True) == ["<s>", " ab"]
    assert pieces(tokenizer, "<s>  abc", special=True) == ["<s>", "  ", "abc"]
    assert pieces(tokenizer, "a<s> b<s><s>c", special=True) == ["a", "<s>", " ", "b", "<s>", "<s>", "c"]


def test_same_ids_as_the_reference_around_control_tokens() -> None:  # B78
    """A differential run: blanks, line ends, accents and control tokens in every order."""
    words = [word for word in WORDS if word != "aaa"]
    tokenizer = tokenizer_of(words)
    given = metadata(words, [])
    tokens = given["tokenizer.ggml.tokens"]
    merges = [(word[:cut], word[cut:]) for word in words for cut in range(1, len(word))]
    known = [pair for pair in merges if pair[0] in words and pair[1] in words]
    reference = RustTokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=known,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("\n\n", "  ")])
    reference.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    draw = random.Random(78)
    atoms = [
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "1",
        "23",
        "é",
        "龘",
        "🙂",
        "a",
        "ab",
        "cab",
        "b ",
        "<s>",
        "</s>",
        "<s",
    ]
    for _ in range(20_000):
        text = "".join(draw.choices(atoms, k=draw.randint(1, 9)))
        ours = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ours == reference.encode(text, add_special_tokens=False).ids, text


def test_user_defined_tokens_are_matched_whole_in_both_modes() -> None:
    tokenizer = tokenizer_of(WORDS)
    for special in (False, True):
        assert pieces(tokenizer, "a\n\nb   c", special=special) == ["a", "\n\n", "b", "  ", " ", "c"]


def test_begin_token_by_default() -> None:  # B80
    tokenizer = tokenizer_of(WORDS)
    assert tokenizer.bos_id == 1
    assert tokenizer.add_bos
    assert tokenizer.encode("a", add_special=True, parse_special=False)[0] == 1
    assert tokenizer.encode("<s>a", add_special=True, parse_special=True)[:2] != [1, 1]
    assert not tokenizer_of(WORDS, add_bos_token=False).add_bos


def test_loads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pieces.gguf"
    path.write_bytes(build.metadata_file(metadata(WORDS, [-float(i) for i in range(len(WORDS))])))
    model = load_text_model(str(path))
    assert model.name == "pieces"
    assert model.end_ids == {2}
    assert pieces(model.tokenizer, "ab") == ["ab"]


def test_missing_scores_are_refused() -> None:
    broken = metadata(WORDS, [0.0] * len(WORDS))
    del broken["tokenizer.ggml.scores"]
    with pytest.raises(VocabularyError, match="scores"):
        sentencepiece_tokenizer(Vocabulary.from_metadata(broken))
