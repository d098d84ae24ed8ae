"""Streamed text never holds half a character, and does not depend on how tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import Detokenizer, detokenize
from text.byte_tokenizer import END_ID, USER_ID, ByteTokenizer

TOKENIZER = ByteTokenizer()


def stream(ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    out, at = [], 0
    for size in sizes:
        out.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*out, detokenizer.push(ids[at:]), detokenizer.flush()]


def test_characters_come_whole() -> None:
    text = "ž🫠龘𝛀 fin"
    ids = list(text.encode())
    deltas = stream(ids, [1] * len(ids))
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


@pytest.mark.parametrize("limit", range(len("ž🫠龘𝛀 fin".encode()) + 1))
def test_a_character_cut_by_the_limit_is_dropped_in_both_modes(limit: int) -> None:
    text = "ž🫠龘𝛀 fin"
    ids = list(text.encode())[:limit]
    streamed = "".join(stream(ids, [1] * limit))
    assert streamed == detokenize(TOKENIZER, ids) == text.encode()[:limit].decode(errors="ignore")


def test_invalid_bytes_are_marked_as_soon_as_they_are_certain() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.push([ord("a")]) == "\ufffda"
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.flush() == ""


def test_control_tokens_add_nothing_and_break_nothing() -> None:
    assert detokenize(TOKENIZER, [USER_ID, 0xC3, END_ID, 0xBC, 265]) == "ü"


@given(st.binary(max_size=60), st.lists(st.integers(0, 9), max_size=30))
def test_splits_do_not_matter(raw: bytes, sizes: list[int]) -> None:
    deltas = stream(list(raw), sizes)
    assert "".join(deltas) == detokenize(TOKENIZER, raw)
    assert raw.decode(errors="replace").startswith("".join(deltas))


@given(st.text(max_size=40), st.lists(st.integers(0, 5), max_size=40))
def test_valid_text_comes_back(text: str, sizes: list[int]) -> None:
    assert "".join(stream(list(text.encode()), sizes)) == text
