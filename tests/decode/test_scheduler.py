"""The scheduler alone: who is in the next step, and with which pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from decode.choice import Choice
from decode.frames import Finish, Frame
from decode.opening import Limits, extra_pages
from decode.request import Phase, Request
from decode.scheduler import FILL_TOKENS, Plan, Scheduler
from engine.sampling import Sampled
from mesh.kv.page import Page
from tests.decode.openings import LIMITS, P, opening


class Outbox:
    congested = False

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)


class Grant:
    def __init__(self, pages: int) -> None:
        self.free = [Page(1000 + i, 1) for i in range(pages)]

    def take(self, n: int) -> list[Page] | None:
        if n > len(self.free):
            return None
        return [self.free.pop() for _ in range(n)]


_ids = count()


def running(
    scheduler: Scheduler, length: int, *, arrival: int = 1, n: int = 1, draws: bool = False, **changes: object
) -> Request:
    """A request that is in the steps, with its prefix leased or (draws) to be computed here."""
    asked = opening(range(length), f"r{next(_ids)}/0", arrival_unix_ns=arrival, n=n, **changes)
    request = Request(asked, Outbox(), 0)
    blocks = [Page(100 * next(_ids) + i, 1) for i in range(asked.prefix_blocks)]
    extra = [Page(100 * next(_ids) + i, 7) for i in range(extra_pages(asked, P))]
    request.reserved([] if draws else blocks, extra)
    request.begin(P, dict(enumerate(blocks)) if draws else {})
    scheduler.add(request)
    return request


def no_drafts(request: Request, choice: Choice) -> Sequence[int]:
    return ()


def step(plan: Plan, scheduler: Scheduler) -> None:
    """What the loop does after a step, with token 7 sampled everywhere."""
    for part in plan.parts:
        part.choice.computed += part.count
        if part.samples:
            if not part.request.forked:
                part.request.fork(part.fork, P)
            for choice in part.request.choices if part.fork else [part.choice]:
                choice.accept([Sampled(7)], (), part.request.opening, LIMITS.context_length)
        for choice in part.request.choices:
            choice.complete_blocks(P)
        if not part.request.forked:
            part.request.skip_leased(P)


def test_a_leased_prefix_leaves_the_tail_only() -> None:
    scheduler = Scheduler(LIMITS, Grant(0).take, no_drafts)
    running(scheduler, 3 * P)
    running(scheduler, 3 * P + 1)
    assert [(p.choice.computed, p.count, p.samples) for p in scheduler.plan().parts] == [
        (3 * P, 1, True),
        (2 * P, P, True),
    ]


def test_a_prompt_of_ones_own_is_computed_in_small_pieces_beside_generation() -> None:
    scheduler = Scheduler(LIMITS, Grant(9).take, no_drafts)
    generating = running(scheduler, 4)
    step(scheduler.plan(), scheduler)
    running(scheduler, 10 * P, draws=True)
    fed = 0
    while (plan := scheduler.plan()).parts and fed < 10 * P:
        counts = {p.request: p.count for p in plan.parts}
        assert counts.pop(generating) == 1
        assert sum(counts.values()) <= FILL_TOKENS
        fed += sum(counts.values())
        step(plan, scheduler)
    assert fed == 10 * P


def test_pieces_step_over_blocks_that_others_committed() -> None:
    scheduler = Scheduler(LIMITS, Grant(0).take, no_drafts)
    request = running(scheduler, 6 * P, draws=True)
    request.arrived([(1, Page(901, 1)), (2, Page(902, 1)), (4, Page(904, 1))], P)
    pieces = []
    while not request.forked:
        plan = scheduler.plan()
        pieces += [(p.choice.computed // P, p.count) for p in plan.parts]
        step(plan, scheduler)
    assert pieces == [(0, P), (3, P), (5, P)]
    assert [page.index for page in request.choices[0].table[1:5:3]] == [901, 904]


def test_a_prompt_whose_next_block_arrives_between_steps_goes_on() -> None:
    scheduler = Scheduler(LIMITS, Grant(0).take, no_drafts)
    request = running(scheduler, 4 * P + 5, draws=True)
    step(scheduler.plan(), scheduler)
    request.arrived([(2, Page(902, 1)), (3, Page(903, 1))], P)
    [part] = scheduler.plan().parts
    assert (part.choice.computed, part.count, part.samples) == (4 * P, 5, True)
    assert part.choice.last_id == request.opening.block_ids[-1]


def test_choices_share_whole_pages_and_have_their_own_unfinished_one() -> None:
    scheduler = Scheduler(LIMITS, Grant(9).take, no_drafts)
    request = running(scheduler, 2 * P + 3, n=3)
    plan = scheduler.plan()
    assert len(plan.parts[0].fork) == 2
    step(plan, scheduler)
    tables = [choice.table for choice in request.choices]
    assert len({t[0] for t in tables}) == len({t[1] for t in tables}) == 1
    assert len({t[2] for t in tables}) == 3


def test_a_choice_without_credit_pauses_alone() -> None:
    scheduler = Scheduler(LIMITS, Grant(9).take, no_drafts)
    paused = running(scheduler, 4, credit=2)
    other = running(scheduler, 4)
    for _ in range(4):
        step(scheduler.plan(), scheduler)
    assert (paused.choices[0].generated, other.choices[0].generated) == (2, 4)
    paused.add_credit(1)
    step(scheduler.plan(), scheduler)
    assert (paused.choices[0].generated, other.choices[0].generated) == (3, 5)


def test_the_oldest_gets_the_last_page_and_the_latest_is_the_victim() -> None:
    scheduler = Scheduler(LIMITS, Grant(1).take, no_drafts)
    old = running(scheduler, P, arrival=1, max_tokens=40)
    young = running(scheduler, P, arrival=2, max_tokens=40)
    starved: set[Request] = set()
    for _ in range(20):
        plan = scheduler.plan()
        starved |= {old, young} - {p.request for p in plan.parts} if plan.starved_pages else set()
        step(plan, scheduler)
    assert starved == {young}
    assert scheduler.victim() is young


def test_drafts_are_cut_to_the_room_that_is_left() -> None:
    scheduler = Scheduler(LIMITS, Grant(9).take, lambda request, choice: [1, 2, 3, 4, 5])
    running(scheduler, 4, max_tokens=3)
    running(scheduler, 4, credit=1)
    running(scheduler, 4, max_tokens=30)
    assert sorted(len(part.drafts) for part in scheduler.plan().parts) == [0, 2, 5]


def test_accepting_stops_at_the_first_wrong_draft() -> None:
    request = running(Scheduler(LIMITS, Grant(9).take, no_drafts), 4)
    choice = request.choices[0]
    row = choice.accept([Sampled(9), Sampled(8), Sampled(7)], [9, 5], request.opening, 512)
    assert (row.token_ids, row.finish) == ((9, 8), None)
    assert choice.computed == len(choice.tokens) - 1 == 5


def test_a_choice_ends_at_a_stop_id_at_max_tokens_and_at_the_context() -> None:
    scheduler = Scheduler(LIMITS, Grant(9).take, no_drafts)
    stops = running(scheduler, 4, stop_ids=frozenset({9}))
    row = stops.choices[0].accept([Sampled(9), Sampled(8)], [9], stops.opening, 512)
    assert (row.token_ids, row.finish, row.stop_token_id) == ((9,), Finish.STOP, 9)
    limited = running(scheduler, 4, max_tokens=3, generated=2)
    row = limited.choices[0].accept([Sampled(9)], (), limited.opening, 512)
    assert (row.finish, row.stop_token_id) == (Finish.LENGTH, None)
    full = running(scheduler, 4)
    assert full.choices[0].accept([Sampled(9)], (), full.opening, 5).finish is Finish.LENGTH


def test_a_closing_request_is_in_no_step() -> None:
    scheduler = Scheduler(LIMITS, Grant(9).take, no_drafts)
    request = running(scheduler, 4)
    request.phase = Phase.CLOSING
    assert scheduler.plan().parts == []


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3), st.booleans()), min_size=1, max_size=6),
    grant=st.integers(0, 12),
)
def test_no_page_is_ever_written_by_two(lengths: list[tuple[int, int, bool]], grant: int) -> None:
    limits = Limits(P, 200, 512, 272, 20, 40)
    scheduler = Scheduler(limits, Grant(grant).take, no_drafts)
    requests = [
        running(scheduler, length, n=n, draws=draws, arrival=i, max_tokens=40)
        for i, (length, n, draws) in enumerate(lengths)
    ]
    for _ in range(30):
        plan = scheduler.plan()
        assert sum(part.rows for part in plan.parts) <= limits.step_tokens
        written: list[Page] = []
        for part in plan.parts:
            start, end = part.choice.computed, part.choice.computed + part.rows
            written += part.choice.table[start // P : -(-end // P)]
            written += part.fork
        assert len(set(written)) == len(written)
        step(plan, scheduler)
        for request in requests:
            assert all(len(c.table) * P >= c.computed for c in request.choices)
