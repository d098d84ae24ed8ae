"""Stop strings end the text at their first character, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import StopStrings

PARTS = st.lists(st.text("abc", max_size=5), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    scanner = StopStrings(stops)
    out, found = [], None
    for part in parts:
        safe, matched = scanner.push(part)
        out.append(safe)
        found = found or matched
    return [*out, scanner.flush()], found


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Reads character by character until the text ends with a stop; the longest of these."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_nothing_of_the_stop_leaks() -> None:
    parts = ["one t", "wo STO", "P-HE", "RE-N", "OW three"]
    assert run(["STOP-HERE-NOW"], parts) == (["one t", "wo ", "", "", "", ""], "STOP-HERE-NOW")


def test_a_stop_inside_one_piece() -> None:
    assert run(["ERE-N"], ["one STOP-HERE-NOW three"]) == (["one STOP-H", ""], "ERE-N")


def test_what_only_looked_like_a_stop_is_given_out() -> None:
    assert run(["STOP"], ["a ST", "ART"]) == (["a ", "START", ""], None)
    assert run(["STOP"], ["a STO"]) == (["a ", "STO"], None)
    assert run(["aab"], ["aa", "aa", "b", "x"]) == (["", "aa", "", "", ""], "aab")


def test_one_stop_is_a_prefix_of_another() -> None:
    for parts in (["xEND OF"], ["xE", "ND", " OF"], list("xEND OF")):
        assert run(["END OF", "END"], parts)[1] == "END"
        assert "".join(run(["END OF", "END"], parts)[0]) == "x"


def test_after_the_stop_comes_nothing() -> None:
    scanner = StopStrings(["."])
    assert scanner.push("a.b") == ("a", ".")
    assert scanner.push("c.") == ("", None)
    assert scanner.flush() == ""


def test_no_stops() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


@given(STOPS, PARTS)
def test_agrees_with_reading_character_by_character(stops: list[str], parts: list[str]) -> None:
    deltas, found = run(stops, parts)
    assert ("".join(deltas), found) == naive(stops, "".join(parts))


@given(STOPS, PARTS)
def test_holds_back_no_more_than_it_must(stops: list[str], parts: list[str]) -> None:
    scanner = StopStrings(stops)
    text = shown = ""
    for part in parts:
        safe, matched = scanner.push(part)
        if matched is not None:
            return
        text += part
        shown += safe
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
