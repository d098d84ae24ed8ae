"""Block ids: equal exactly when everything that decides a page's bits is equal (B69)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.blocks import PAGE_TOKENS, block_id, chain, content_fingerprint, root_id

SALT = b"s" * 32
FINGERPRINT = content_fingerprint(b"weights", "f32", 16, "rope", "reference-1")
ROOT = root_id(SALT, FINGERPRINT)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
extras = st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=4)), max_size=3).map(tuple)


@given(tokens, tokens, extras, extras)
def test_two_blocks_have_one_id_exactly_when_they_are_equal(
    first: list[int],
    second: list[int],
    first_extras: tuple[tuple[str, bytes], ...],
    second_extras: tuple[tuple[str, bytes], ...],
) -> None:
    same = first == second and first_extras == second_extras
    assert (block_id(ROOT, first, first_extras) == block_id(ROOT, second, second_extras)) == same


@given(st.lists(st.integers(0, 70_000), max_size=100), st.integers(1, 20), extras)
def test_a_chain_is_its_blocks_one_by_one(
    ids: list[int], page_tokens: int, more: tuple[tuple[str, bytes], ...]
) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(ids) - page_tokens + 1, page_tokens):
        parent = block_id(parent, ids[start : start + page_tokens], more)
        expected.append(parent)
    assert chain(ROOT, ids, page_tokens, more) == expected
    assert len(expected) == len(ids) // page_tokens


@given(st.lists(st.integers(0, 1000), min_size=32, max_size=64), st.integers(0, 31))
def test_a_changed_token_changes_its_block_and_all_after_it(ids: list[int], place: int) -> None:
    changed = list(ids)
    changed[place] += 1
    before, after = chain(ROOT, ids), chain(ROOT, changed)
    block = place // PAGE_TOKENS
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


def test_parts_of_different_meaning_never_collide() -> None:
    assert block_id(ROOT, [1, 23]) != block_id(ROOT, [12, 3])
    names = [
        block_id(ROOT, [1], [("ab", b"c")]),
        block_id(ROOT, [1], [("a", b"bc")]),
        block_id(ROOT, [1], [("adapter", b"gold")]),
        block_id(ROOT, [1], [("salt", b"gold")]),
        block_id(ROOT, [1], [("adapter", b"")]),
        block_id(ROOT, [1], [("", b"adapter")]),
        block_id(ROOT, [1]),
        block_id(ROOT, []),
    ]
    assert len(set(names)) == len(names)


def test_an_adapter_is_not_a_salt() -> None:
    plain_root = root_id(b"gold", FINGERPRINT)
    assert block_id(plain_root, [1]) != block_id(ROOT, [1], [("adapter", b"gold")])


@given(st.binary(min_size=1, max_size=70), st.binary(min_size=1, max_size=70))
def test_two_salts_share_a_root_only_if_they_are_one(first: bytes, second: bytes) -> None:
    assert (root_id(first, FINGERPRINT) == root_id(second, FINGERPRINT)) == (first == second)


def test_a_salt_and_the_same_salt_with_zeros_behind_differ() -> None:
    assert root_id(b"salt", FINGERPRINT) != root_id(b"salt\0", FINGERPRINT)


def test_every_part_of_the_fingerprint_counts() -> None:
    base = ("weights", "f32", 16, "rope", "reference-1")
    variants = [base]
    for place in range(len(base)):
        changed = list(base)
        changed[place] = 32 if place == 2 else "other"
        variants.append(tuple(changed))  # type: ignore[arg-type]
    prints = {content_fingerprint(v[0].encode(), v[1], v[2], v[3], v[4]) for v in variants}
    assert len(prints) == len(variants)
    assert content_fingerprint(b"w", "f3", 2, "x", "y") != content_fingerprint(b"wf", "3", 2, "x", "y")


def test_ids_are_stable_across_versions() -> None:
    assert ROOT.hex() == "73220743d0ac669cf6a03b4169895298"
    assert chain(ROOT, range(16))[0].hex() == "5e67c5b96d8058bc42f71c5945345e64"


def test_wrong_input_is_an_error() -> None:
    with pytest.raises(ValueError, match="salt"):
        root_id(b"", FINGERPRINT)
    with pytest.raises(ValueError, match="16 bytes"):
        block_id(b"short", [1])
    with pytest.raises(ValueError, match="token ids"):
        block_id(ROOT, [-1])
    with pytest.raises(ValueError, match="token ids"):
        block_id(ROOT, [2**32])
    with pytest.raises(ValueError, match="at least one"):
        chain(ROOT, [1], 0)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711", "random"])
def test_ids_are_the_same_in_every_process(hash_seed: str) -> None:
    """B75: whatever Python's own hash is seeded with, prefill and decode name a block alike."""
    program = (
        "from mesh.blocks import *\n"
        "root = root_id(b's' * 32, content_fingerprint(b'weights', 'f32', 16, 'rope', 'reference-1'))\n"
        "print(chain(root, range(64), 16, [('adapter', b'gold')])[-1].hex())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert said == chain(ROOT, range(64), 16, [("adapter", b"gold")])[-1].hex()
