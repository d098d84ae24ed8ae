from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import InvalidRequest
from mesh.kv.page import Drawn, Page
from prefill.run import Chunk, Run, check, check_chain
from tests.prefill.orders import ROOT, P, order


def pages(*indices: int) -> list[tuple[int, Page]]:
    return [(i, Page(100 + i, 1)) for i in indices]


def test_chunks_cover_what_is_missing_and_nothing_else() -> None:
    run = Run(order(8), 0.0)
    run.look(Drawn(committed=pages(0, 3, 4), writable=pages(1, 2, 5, 6, 7)))
    assert run.next_chunk(9) == Chunk(1, 3)
    assert run.settle(Chunk(1, 3), [Page(101, 1), Page(102, 1)]) == []
    assert run.committed_blocks == 5
    assert run.next_chunk(2) == Chunk(5, 7)


def test_a_block_committed_meanwhile_is_skipped() -> None:
    run = Run(order(4), 0.0)
    run.look(Drawn(committed=[], writable=pages(0, 1, 2, 3)))
    run.look(Drawn(committed=[(0, Page(7, 1)), (1, Page(8, 1))], writable=pages(2, 3)))
    assert run.next_chunk(4) == Chunk(2, 4)
    assert run.table(Chunk(2, 4)) == [7, 8, 102, 103]


def test_a_page_that_lost_is_returned() -> None:
    run = Run(order(2), 0.0)
    run.look(Drawn(committed=[], writable=pages(0, 1)))
    assert run.settle(Chunk(0, 2), [Page(100, 1), Page(55, 2)]) == [Page(101, 1)]
    assert run.table(Chunk(1, 2)) == [100, 55]


def test_block_0_continues_the_root_and_every_other_its_predecessor() -> None:
    run = Run(order(3), 0.0)
    run.look(Drawn(committed=[], writable=pages(0, 1, 2)))
    items = run.items(Chunk(0, 3))
    assert [i.parent_id for i in items] == [ROOT, *run.order.block_ids[:2]]
    assert [i.block_id for i in items] == list(run.order.block_ids)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (replace(order(2), tokens=order(2).tokens[1:]), "prompt"),
        (replace(order(1), tokens=(300,) * P), "prompt"),
        (order(32), "prompt"),
        (order(0), "block_ids"),
        (replace(order(1), root_id=b"x"), "block_ids"),
        (order(1, have=2), "from"),
    ],
)
def test_a_wrong_order_names_the_field(wrong: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check(wrong, page_tokens=P, vocab_size=272, context_length=512)  # type: ignore[arg-type]
    assert error.value.param == param


def test_ids_of_other_tokens_are_refused() -> None:
    check_chain(order(3), P)
    with pytest.raises(InvalidRequest):
        check_chain(replace(order(3), root_id=bytes(16)), P)
