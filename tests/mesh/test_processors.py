"""Processors: how they are written, and how workers are given theirs."""

from __future__ import annotations

import pytest

from mesh.processors import Places, allowed, parse


def test_numbers_between_commas() -> None:
    first = allowed()[0]
    assert parse("any") == ()
    assert parse(f"{first},{first}") == (first, first)


@pytest.mark.parametrize("text", ["", "a", "0,", "-1", "0-1", "99999"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"any|may not use"):
        parse(text)


def test_workers_share_only_when_there_are_too_many() -> None:
    places = Places((0, 2, 4))
    assert [places.take(2), places.take(1), places.take(2)] == ["0,2", "4", "0,2"]
