"""Chooses what the next step computes, and who must go when pages run out.

Pure: no torch, no gRPC, no clock. One step takes, oldest request first, one row
for every choice that is generating, then tails of new prompts, then at most
`FILL_TOKENS` tokens of a prompt that this worker has to compute itself, so that
generation is never held up by a long prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from decode.choice import Choice
from decode.opening import Limits
from decode.request import Phase, Request, Take
from mesh.kv.page import Page

FILL_TOKENS = 32

Draft = Callable[[Request, Choice], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's share of a step.

    Feeds `count` tokens from `choice.computed` on, then the drafts. If it samples,
    the last 1 + len(drafts) rows give logits. `fork` are pages for copies of the
    unfinished page, one per choice after the first.
    """

    request: Request
    choice: Choice
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    fork: tuple[Page, ...] = ()

    @property
    def rows(self) -> int:
        return self.count + len(self.drafts)


@dataclass(slots=True)
class Plan:
    """`starved_pages` is what the oldest request without a page lacks; 0 when all have theirs."""

    parts: list[Part] = field(default_factory=list)
    starved_pages: int = 0
    rows: int = 0
    filled: int = 0


class Scheduler:
    """Holds the requests of the worker. All methods are to be called between steps."""

    def __init__(self, limits: Limits, take: Take, draft: Draft) -> None:
        self._limits = limits
        self._take = take
        self._draft = draft
        self._fill_tokens = max(FILL_TOKENS, limits.page_tokens)
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def get(self, handoff_id: str) -> Request | None:
        return self._requests.get(handoff_id)

    def add(self, request: Request) -> None:
        self._requests[request.handoff_id] = request

    def remove(self, request: Request) -> None:
        self._requests.pop(request.handoff_id, None)

    @property
    def sequences(self) -> int:
        """Choices that run or will run."""
        return sum(r.sequences for r in self._requests.values() if r.phase is not Phase.CLOSING)

    def in_phase(self, *phases: Phase) -> int:
        return sum(r.phase in phases for r in self._requests.values())

    @property
    def fill_steps(self) -> float:
        """Steps that it takes to compute what is left of the prompts that this worker computes itself."""
        left = sum(r.choices[0].waiting_tokens for r in self._requests.values() if r.filling)
        return left / self._fill_tokens

    @property
    def holders(self) -> int:
        """Requests that hold pages and are not on their way out."""
        return self.in_phase(Phase.HANDING_OVER, Phase.RUNNING)

    def victim(self) -> Request | None:
        """The holder with the latest arrival."""
        holders = [r for r in self._requests.values() if r.phase in (Phase.HANDING_OVER, Phase.RUNNING)]
        return max(holders, key=lambda r: r.arrival, default=None)

    def plan(self) -> Plan:
        plan = Plan()
        running = sorted(self._running(), key=lambda r: r.arrival)
        for generating in (True, False):
            for request in running:
                for choice in request.choices:
                    if (choice.waiting_tokens == 1) is generating and not choice.paused:
                        self._add(plan, request, choice)
        return plan

    def _running(self) -> Iterable[Request]:
        return (r for r in self._requests.values() if r.phase is Phase.RUNNING and not r.session.congested)

    def _add(self, plan: Plan, request: Request, choice: Choice) -> None:
        count = self._count(plan, request, choice)
        if count == 0:
            return
        samples = count == choice.waiting_tokens
        part = self._with_pages(request, choice, count, samples, self._limits.step_tokens - plan.rows - count)
        if part is None:
            plan.starved_pages = plan.starved_pages or self._lacking(request, choice, count)
            return
        plan.parts.append(part)
        plan.rows += part.rows
        if not samples or count > self._limits.page_tokens:
            plan.filled += count

    def _count(self, plan: Plan, request: Request, choice: Choice) -> int:
        """Tokens to feed now; 0 leaves the choice out of this step."""
        rows = self._limits.step_tokens - plan.rows
        waiting = choice.waiting_tokens
        if waiting <= self._limits.page_tokens:
            return waiting if waiting <= rows else 0
        limit = min(rows, self._fill_tokens - plan.filled)
        return request.piece(self._limits.page_tokens, limit) if limit >= self._limits.page_tokens else 0

    def _with_pages(
        self, request: Request, choice: Choice, count: int, samples: bool, spare_rows: int
    ) -> Part | None:
        """The part with all its pages in place, or None when there are none to be had."""
        page_tokens = self._limits.page_tokens
        end = choice.computed + count
        if samples and not request.forked and request.opening.n > 1:
            copies = request.opening.n - 1 if end % page_tokens else 0
            if not request.grow(choice, -(-end // page_tokens), self._take):
                return None
            pages = request.pages(copies, self._take)
            return None if pages is None else Part(request, choice, count, samples, (), tuple(pages))
        drafts: tuple[int, ...] = ()
        if samples:
            most = min(choice.room(request.opening, self._limits.context_length) - 1, spare_rows)
            drafts = tuple(self._draft(request, choice))[: max(most, 0)]
        if drafts and request.grow(choice, -(-(end + len(drafts)) // page_tokens), self._take):
            return Part(request, choice, count, samples, drafts)
        if not request.grow(choice, -(-end // page_tokens), self._take):
            return None
        return Part(request, choice, count, samples)

    def _lacking(self, request: Request, choice: Choice, count: int) -> int:
        page_tokens = self._limits.page_tokens
        end = choice.computed + count
        copies = request.opening.n - 1 if not request.forked and end % page_tokens else 0
        return -(-end // page_tokens) - len(choice.table) + copies - len(request.spare)
