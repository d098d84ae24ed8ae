"""Added tokens are cut out whole: leftmost first, longest there, exactly as a plain search would."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from text.added_tokens import AddedTokens


def naive(tokens: dict[str, int], text: str) -> list[str | int]:
    if not tokens:
        return [text] if text else []
    longest_first = sorted(tokens, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [tokens[part] if i % 2 else part for i, part in enumerate(parts) if part or i % 2]


def test_longest_at_the_leftmost_place() -> None:
    added = AddedTokens({"\n": 1, "\n\n": 2, "<|a|>": 3, "<|": 4})
    assert list(added.split("x\n\n\ny<|a|><|b")) == ["x", 2, 1, "y", 3, 4, "b"]
    assert list(added.split("")) == []
    assert list(AddedTokens({}).split("<|a|>")) == ["<|a|>"]
    assert list(AddedTokens({"": 7}).split("ab")) == ["ab"]


@given(
    st.sets(st.text("ab<|\n]^-\\", min_size=1, max_size=4), max_size=8),
    st.text("ab<|\n]^-\\x", max_size=40),
)
def test_agrees_with_a_plain_search(texts: set[str], text: str) -> None:
    tokens = {token: i for i, token in enumerate(sorted(texts))}
    assert list(AddedTokens(tokens).split(text)) == naive(tokens, text)
