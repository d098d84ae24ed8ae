"""One organisation's prompts cannot take more of the memory than its share."""

from __future__ import annotations

import pytest

from kvstore import recovery
from kvstore.invariants import violations
from kvstore.owners import Sealed
from kvstore.pool import PagePool
from mesh.errors import InvalidRequest, OutOfPages


def ids(org: str, chain: int, blocks: int) -> list[bytes]:
    return [f"{org}{chain}/{i}".encode().ljust(16, b".") for i in range(blocks)]


def fill(pool: PagePool, org: str, chain: int, blocks: int, *, keep: bool = False) -> None:
    name, wanted = f"{org}{chain}", ids(org, chain, blocks)
    pool.reserve(1, name, org, wanted, 0)
    drawn = pool.draw(1, name, org, 1)
    for i, page in drawn.writable:
        pool.commit(1, name, [Sealed(page, wanted[i], wanted[i - 1] if i else b"r" * 16, 0)], 1)
    if not keep:
        pool.release(1, [name], [])
    assert not violations(pool)


def test_what_is_above_the_share_goes_at_the_cost_of_its_own_oldest() -> None:
    pool = PagePool(20, org_share=0.5)
    recovery.open_owner(pool, 1, "w")
    fill(pool, "quiet", 0, 6)
    for chain in range(20):
        fill(pool, "loud", chain, 4)
        assert pool.table.committed_of["loud"] <= 10
    assert pool.lookup(ids("quiet", 0, 6)) == 6
    assert [pool.lookup(ids("loud", chain, 4)) for chain in (17, 18, 19)] == [2, 4, 4]


def test_what_is_in_use_is_not_taken_and_the_excess_is_refused() -> None:
    pool = PagePool(20, org_share=0.5)
    recovery.open_owner(pool, 1, "w")
    fill(pool, "loud", 0, 8, keep=True)
    with pytest.raises(OutOfPages) as refused:
        pool.reserve(1, "more", "loud", ids("loud", 1, 3), 0)
    assert refused.value.code == "org_share"
    with pytest.raises(InvalidRequest):
        pool.reserve(1, "never", "loud", ids("loud", 2, 11), 0)
    assert not violations(pool)
    fill(pool, "quiet", 0, 10)
    pool.release(1, ["loud0"], [])
    fill(pool, "loud", 1, 3)
    assert pool.lookup(ids("quiet", 0, 10)) == 10


def test_without_a_bound_one_may_have_everything() -> None:
    pool = PagePool(20)
    recovery.open_owner(pool, 1, "w")
    fill(pool, "loud", 0, 20)
    assert pool.lookup(ids("loud", 0, 20)) == 20
