"""The text of API keys."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from iam_authz.api_key import SECRET_LENGTH, looks_like_key, new_key, parse_key

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
KEY = new_key()


def test_keys_have_their_shape_and_enough_randomness() -> None:
    prefix, public_id, rest = KEY.text.split("_")
    assert (prefix, public_id) == ("kvm", KEY.id)
    assert len(rest) == SECRET_LENGTH + 6
    assert SECRET_LENGTH * math.log2(62) >= 256
    assert len({new_key().text for _ in range(200)}) == 200
    assert parse_key(KEY.text) == KEY
    assert KEY.text not in repr(KEY)


@given(st.integers(4, len(KEY.text) - 1), st.sampled_from(ALPHABET))
def test_every_single_wrong_character_is_noticed(place: int, character: str) -> None:
    wrong = KEY.text[:place] + character + KEY.text[place + 1 :]
    assert (parse_key(wrong) is None) == (wrong != KEY.text)


@given(st.text(max_size=100))
def test_other_texts_are_no_keys(text: str) -> None:
    assert parse_key(text) is None
    assert parse_key(KEY.text + text) is None or not text
    assert parse_key(text + KEY.text) is None or not text


def test_a_key_is_told_from_a_token() -> None:
    assert looks_like_key("kvm_x")
    assert not looks_like_key("eyJhbGciOi.x.y")
