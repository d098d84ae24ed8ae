"""JSON with one meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iam_authz.strict_json import MAX_DEPTH, StrictJsonError, loads

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


@given(values, st.booleans())
def test_ordinary_json_is_read_as_python_reads_it(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth(value) > MAX_DEPTH:
        with pytest.raises(StrictJsonError):
            loads(data)
    else:
        assert loads(data) == value


@given(st.binary(max_size=60))
def test_no_bytes_make_another_error(data: bytes) -> None:
    try:
        loads(data)
    except StrictJsonError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": 1, "\\u0061": 2}',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"9" * 5_000,
        b'"\\ud83d"',
        b'{"\\udc00": 1}',
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        b"[" * 9 + b"]" * 9,
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b"{} {}",
    ],
)
def test_doubtful_json_is_refused(data: bytes) -> None:
    with pytest.raises(StrictJsonError):
        loads(data)


def test_brackets_in_strings_do_not_count() -> None:
    assert loads(json.dumps({"a": "[[[[[[[[[[" + '\\"{{{{{{{{'}).encode()) == {"a": '[[[[[[[[[[\\"{{{{{{{{'}
