"""Random lives of a page pool, checked against the model of `pool_machine.py` at every step."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore import recovery
from kvstore.holdings import Holdings
from kvstore.owners import Slot
from kvstore.pool import PagePool
from mesh.errors import Conflict
from tests.kvstore.pool_machine import CHAINS, DEPTH, PoolMachine, block


def test_random_lives_leave_no_page_lost_or_shared() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_long_random_lives(seed: int) -> None:
    """The same rules in proportions that bring about hand-overs, fences and evictions often."""
    machine, chance = PoolMachine(), Random(seed)
    machine.begin(pages=chance.randint(12, 30), workers=3)
    seen: Counter[str] = Counter()
    real_fence = Holdings.fence

    def counted(self: Holdings, handoff_id: str, slot: Slot) -> None:
        seen["fence"] += 1
        real_fence(self, handoff_id, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holdings, "fence", counted)
        for _ in range(3000):
            n, which = chance.randrange(6), chance.randrange(6)
            match chance.choices(range(11), (15, 30, 8, 3, 2, 8, 2, 6, 2, 1, 4))[0]:
                case 0:
                    chain, blocks = chance.randrange(CHAINS), chance.randint(1, DEPTH)
                    machine.reserve(n, chain, blocks, chance.randrange(2))
                case 1:
                    machine.draw(n, which, max(0, machine.attempt(which) + chance.choice((-1, 0, 0, 1))))
                case 2:
                    machine.commit_drawn(n, which, chance.randint(1, 3))
                case 3:
                    machine.commit_granted(n, chance.randrange(CHAINS), chance.randrange(DEPTH))
                case 4:
                    machine.grant(n, chance.randint(1, 3), chance.random() < 0.5)
                case 5:
                    machine.release(n, which)
                case 6:
                    machine.session_breaks(n, True)
                case 7:
                    machine.comes_back(n, chance.random() < 0.3)
                case 8:
                    machine.dies(n, chance.random() < 0.5, True)
                case 10:
                    machine.overtake(n, which, chance.random() < 0.8)
                case 9:
                    machine.store_restarts(chance.randrange(2), True)
            machine.holds()
    machine.teardown()
    assert seen["fence"] > 2
    assert machine.evicted > 5


def test_a_handoff_of_another_worker_cannot_be_reserved_again() -> None:
    pool = PagePool(4)
    recovery.open_owner(pool, 1, "a")
    recovery.open_owner(pool, 2, "b")
    pool.reserve(1, "h", "org", [block(0, 0)], 0)
    try:
        pool.reserve(2, "h", "org", [block(0, 0)], 0)
    except Conflict:
        pass
    else:
        raise AssertionError("two workers reserved one handoff")
