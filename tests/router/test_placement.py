"""The choice between workers: least loaded, cached prefixes as a hint, full ones left alone. Pure."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.placement import Gate, LoadReport, Placement, Worker


def worker(name: str, role: str = "decode", **fields: object) -> Worker:
    given_ = {"node": "n0", "model": "m", "fingerprint": b"f", "capacity": 4, "connected": True, **fields}
    return Worker(name=name, role=role, **given_)  # type: ignore[arg-type]


def placed(*workers: Worker, seed: int = 1) -> Placement:
    placement = Placement(seed)
    for item in workers:
        placement.put(item)
    return placement


def nothing(worker: Worker) -> int:
    return 0


def test_equal_workers_take_turns_and_the_least_loaded_comes_first() -> None:
    placement = placed(worker("a"), worker("b"), worker("c"))
    order = []
    for _ in range(9):
        chosen = placement.choose_decode("m", 1, 0, nothing)
        assert chosen is not None
        placement.taken(chosen, 1)
        order.append(chosen.name)
    assert Counter(order) == {"a": 3, "b": 3, "c": 3}
    busy = placement.get("a")
    assert busy is not None
    placement.ended(busy, 3)
    assert placement.choose_decode("m", 1, 0, nothing) is busy


def test_routers_begin_at_different_workers() -> None:
    firsts = set()
    for seed in range(20):
        chosen = placed(worker("a"), worker("b"), seed=seed).choose_decode("m", 1, 0, nothing)
        assert chosen is not None
        firsts.add(chosen.name)
    assert firsts == {"a", "b"}


def test_what_other_routers_give_a_worker_counts() -> None:
    a, b = worker("a"), worker("b")
    placement = placed(a, b)
    placement.said("a", LoadReport(running=3, waiting=1, free_pages=0))
    for _ in range(4):
        chosen = placement.choose_decode("m", 1, 0, nothing)
        assert chosen is b
        placement.taken(b, 1)
    assert placement.choose_decode("m", 1, 0, nothing) is a


def test_a_cached_prefix_decides_between_nodes_until_load_outweighs_it() -> None:
    a, b = worker("a", node="n0", capacity=99), worker("b", node="n1", capacity=99)
    placement = placed(a, b)

    def held(item: Worker) -> int:
        return 32 if item is b else 0

    for _ in range(4):
        chosen = placement.choose_decode("m", 1, 40, held)
        assert chosen is b
        placement.taken(b, 1)
    placement.taken(b, 1)
    assert placement.choose_decode("m", 1, 40, held) is a


def test_only_usable_workers_of_the_model_with_room() -> None:
    gone, drains, other = worker("a", connected=False), worker("b", draining=True), worker("c", model="x")
    full = worker("d", capacity=2)
    placement = placed(gone, drains, other, full)
    placement.taken(full, 2)
    assert placement.choose_decode("m", 1, 0, nothing) is None
    placement.ended(full, 1)
    assert placement.choose_decode("m", 1, 0, nothing) is full
    placement.ended(full, 1)
    # One that is idle says itself what can never fit.
    assert placement.choose_decode("m", 9, 0, nothing) is full


def test_a_full_worker_is_probed_with_one_request_after_something_happened() -> None:
    a = worker("a")
    placement = placed(a)
    placement.taken(a, 1)
    placement.taken(a, 1)
    placement.refused(a)
    assert placement.choose_decode("m", 1, 0, nothing) is None
    placement.ended(a, 1)
    assert a.gate is Gate.PROBING
    assert placement.choose_decode("m", 1, 0, nothing) is a
    placement.taken(a, 1)
    assert placement.choose_decode("m", 1, 0, nothing) is None
    placement.accepted(a)
    assert placement.choose_decode("m", 1, 0, nothing) is a
    placement.refused(a)
    placement.said("a", LoadReport(1, 0, 5))
    assert placement.choose_decode("m", 1, 0, nothing) is a


def test_prefill_is_the_least_loaded_one_whose_pages_can_be_used() -> None:
    decode = worker("d")
    near, far = worker("p0", "prefill"), worker("p1", "prefill", node="n1")
    other = worker("p2", "prefill", fingerprint=b"g")
    placement = placed(decode, near, far, other)
    assert placement.choose_prefill(decode) is near
    assert placement.choose_prefill(decode, ["p0"]) is far
    assert placement.choose_prefill(decode, ["p0", "p1"]) is None
    second = placement.put(worker("p3", "prefill"))
    placement.taken(near, 1)
    assert placement.choose_prefill(decode) is second
    placement.taken(near, 1)
    placement.taken(second, 2)
    assert placement.choose_prefill(decode) is far


def test_an_update_keeps_what_is_ours() -> None:
    a = worker("a")
    placement = placed(a)
    placement.taken(a, 3)
    known = placement.put(worker("a", capacity=9, draining=True, connected=False))
    assert known is a
    assert (a.ours, a.capacity, a.draining, a.connected) == (3, 9, True, True)


@given(
    st.lists(st.sampled_from(["take", "end", "refuse", "accept", "stir", "load"]), max_size=60),
    st.integers(0, 9),
)
def test_an_idle_worker_is_always_reached_again(events: list[str], seed: int) -> None:
    a = worker("a")
    placement = placed(a, seed=seed)
    ours = 0
    for event in events:
        if event == "take" and placement.choose_decode("m", 1, 0, nothing) is not None:
            placement.taken(a, 1)
            ours += 1
        elif event == "end" and ours:
            placement.ended(a, 1)
            ours -= 1
        elif event == "refuse" and ours:
            placement.ended(a, 1)
            placement.refused(a)
            ours -= 1
        elif event == "accept" and ours:
            placement.accepted(a)
        elif event == "stir":
            placement.stir(a)
        elif event == "load":
            placement.said("a", LoadReport(ours, 0, 1))
    assert a.ours == ours
    for _ in range(ours):
        placement.ended(a, 1)
    placement.stir(a)
    placement.said("a", LoadReport(0, 0, 1))
    assert placement.choose_decode("m", 1, 0, nothing) is a
