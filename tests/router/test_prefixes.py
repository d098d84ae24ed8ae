"""Which node holds which blocks: news in order, gaps make the router ask."""

from __future__ import annotations

from router.fleet import read_block_news
from router.prefixes import BlockNews, PrefixIndex

A, B, C, D = (bytes([i]) * 16 for i in range(4))


def test_news_are_applied_in_order_and_a_gap_asks_for_everything() -> None:
    asked: list[str] = []
    index = PrefixIndex(asked.append)
    index.heard(BlockNews("n", 100, (A,)))
    assert asked == ["n"]
    assert index.held("n", [A]) == 0
    index.heard(BlockNews("n", 101, (C,)))
    index.listed("n", 100, [A, B])
    assert index.held("n", [A, B, C, D]) == 3
    index.heard(BlockNews("n", 101, (D,)))
    assert index.held("n", [A, B, C, D]) == 3
    index.heard(BlockNews("n", 102, (D,), (B,)))
    assert index.held("n", [A, B, C, D]) == 1
    index.heard(BlockNews("n", 104, (B,)))
    assert asked == ["n", "n"]
    index.listing_failed("n")
    index.heard(BlockNews("n", 105))
    assert asked == ["n", "n", "n"]
    index.forget("n")
    assert index.held("n", [A]) == 0
    assert index.held("other", [A]) == 0


def test_malformed_news_are_dropped() -> None:
    good = b'{"seq":7,"model":"m","fingerprint":"00","stored":["' + A.hex().encode() + b'"],"removed":[]}'
    assert read_block_news("kv.events.n", good) == BlockNews("n", 7, (A,), ())
    for bad in (b"", b"[]", b"{}", b'{"seq":"x"}', b'{"seq":1,"stored":["zz"]}', b'{"seq":1,"stored":5}'):
        assert read_block_news("kv.events.n", bad) is None
