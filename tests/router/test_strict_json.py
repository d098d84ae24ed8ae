"""The JSON reader refuses what lenient readers let through, quickly and without recursion."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from router.openai.strict_json import DEPTH_MAX, parse_object


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deep"),
        (b"[" * 1_000_000, "deep"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"m":[{"a":1,"b":2,"a":3}]}', "twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e999}', "range"),
        (b'{"a":' + b"9" * 10_000 + b"}", "long"),
        (b'{"a":"\\ud83d"}', "surrogate"),
        (b'{"a":["x",{"b":"\\udc00\\ud83d"}]}', "surrogate"),
        (b'{"\\udc00":1}', "surrogate"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b'\xef\xbb\xbf{"a":1}', "byte order mark"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"", "parse"),
        (b'{"a":1} x', "parse"),
        (b"{'a':1}", "parse"),
        (b'{"a":1,}', "parse"),
        (b'{"a":01}', "parse"),
        (b'{"a":"\x01"}', "parse"),
        (b'{"a":"' + b'\\"' * 100_000, "parse"),
        (b"{" + b'"\\"' * 50_000 + b"[{" * 40, "parse"),
    ],
)
def test_hostile_bodies_are_refused_fast(body: bytes, reason: str) -> None:  # B27, B29
    begun = time.perf_counter()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        parse_object(body)
    assert time.perf_counter() - begun < 0.1
    assert caught.value.code == "invalid_json"
    assert "Error" not in caught.value.message


def test_what_is_allowed_is_read_exactly() -> None:
    assert parse_object(b'{"a":"pair \\ud83d\\ude42","b":[1,2.5,true,null]}') == {
        "a": "pair \U0001f642",
        "b": [1, 2.5, True, None],
    }
    nested = b'{"a":' + b"[" * (DEPTH_MAX - 1) + b"]" * (DEPTH_MAX - 1) + b"}"
    assert parse_object(nested)
    brackets = json.dumps({"a": "[{" * 5000, "b": '\\"[' * 5000}).encode()
    assert parse_object(brackets)["a"] == "[{" * 5000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_python_writes_is_read_back(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=64))
def test_no_bytes_do_anything_but_be_refused(body: bytes) -> None:
    try:
        parse_object(body)
    except InvalidRequest:
        pass
