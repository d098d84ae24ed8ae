"""What is on disk against a plain model: sizes, shares, and that nothing lies behind a gap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.disk_books import DiskBooks
from kvstore.disk_files import Place

SIZE = 100
ARENAS = ("a", "b")
ORGS = ("acme", "zeta", "omega")


def block(org: int, chain: int, depth: int) -> bytes:
    return f"{org}/{chain if depth > 1 else 's'}/{depth}".encode().ljust(16, b".")


steps = st.lists(
    st.tuples(
        st.sampled_from(["evict", "evict", "evict", "use", "lose", "forget"]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 40), st.sampled_from([1.0, 0.5, 0.34]))
def test_bounded_shared_and_prefix_closed(
    walk: list[tuple[str, int, int, int, int]], room: int, share: float
) -> None:
    """A chain is evicted from its end, as memory does it; `memory` is how much of it is left there."""
    books = DiskBooks(room * SIZE, share)
    model: dict[tuple[str, bytes], tuple[str, bytes]] = {}
    memory: dict[tuple[str, bytes], bool] = {}

    def drop(arena: str, ids: list[bytes]) -> None:
        for block_id in ids:
            del model[(arena, block_id)]

    for action, a, o, chain, depth in walk:
        arena, org = ARENAS[a], ORGS[o]
        ids = [block(o, chain, d) for d in range(depth)]
        parents = [b"root" * 4, *ids]
        if action == "evict":
            for d in reversed(range(depth)):
                key = (arena, ids[d])
                memory[key] = False
                if key in model:
                    continue
                gone = books.make_room(org, SIZE)
                if gone is None:
                    for kept in books.lose(arena, ids[d]):
                        drop(kept.place.arena, [kept.place.block_id])
                    continue
                for kept in gone:
                    drop(kept.place.arena, [kept.place.block_id])
                books.add(Place(arena, org, ids[d], parents[d]), SIZE)
                model[key] = (org, parents[d])
        elif action == "use" and (used := books.of(arena).get(ids[-1])) is not None:
            books.used(used)
        elif action == "lose":
            drop(arena, [kept.place.block_id for kept in books.lose(arena, ids[-1])])
        elif action == "forget":
            for kept in books.of_organisation(org):
                drop(
                    kept.place.arena,
                    [k.place.block_id for k in books.lose(kept.place.arena, kept.place.block_id)],
                )
        assert {(n, b) for n in ARENAS for b in books.of(n)} == set(model)
        assert books.bytes == SIZE * len(model) <= room * SIZE
        for name in ORGS:
            assert SIZE * sum(owner == name for owner, _ in model.values()) <= int(room * SIZE * share)


def chain_of(books: DiskBooks, n: int, org: str = "acme") -> list[bytes]:
    ids = [block(0, 0, d) for d in range(n)]
    for d in reversed(range(n)):
        for _ in books.make_room(org, SIZE) or ():
            pass
        books.add(Place("a", org, ids[d], ids[d - 1] if d else b"root" * 4), SIZE)
    return ids


def test_the_end_of_a_chain_goes_first_whatever_was_used_last() -> None:
    books = DiskBooks(5 * SIZE)
    ids = chain_of(books, 5)
    books.used(books.of("a")[ids[4]])
    for left in (4, 3, 2):
        (gone,) = books.make_room("zeta", SIZE) or []
        assert gone.place.block_id == ids[left]
        books.add(Place("a", "zeta", bytes([left]) * 16, b"root" * 4), SIZE)
        books.used(books.of("a")[bytes([left]) * 16])


def test_a_lost_block_takes_what_continues_it() -> None:
    books = DiskBooks(9 * SIZE)
    ids = chain_of(books, 6)
    assert {k.place.block_id for k in books.lose("a", ids[2])} == set(ids[2:])
    assert set(books.of("a")) == set(ids[:2])


def test_what_is_larger_than_a_share_is_never_kept() -> None:
    assert DiskBooks(10 * SIZE, 0.5).make_room("acme", 6 * SIZE) is None
    assert DiskBooks(10 * SIZE, 0.5).make_room("acme", 5 * SIZE) == []
