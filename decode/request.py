"""A request that this worker has taken: its phase, its choices and the pages it owns.

Pure. Two kinds of pages: *leased* ones (committed; the store counts them under the
handoff id and one release ends them all) and *own* ones (granted; this worker must
give each back exactly once, unless a commit turns it into a leased one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from decode.choice import Choice, FullBlock
from decode.frames import FrameSink, Logprobs
from decode.opening import Opening
from mesh.kv.page import Page
from text.grammar import Matcher

Take = Callable[[int], "list[Page] | None"]


class Stoppable(Protocol):
    """What runs beside the loop for a request."""

    async def stop(self) -> None:
        """Ends it; nothing more is taken for the request afterwards."""

    def stop_following(self) -> None: ...


class Phase(Enum):
    """Where a request is."""

    RESERVING = auto()
    HANDING_OVER = auto()
    RUNNING = auto()
    CLOSING = auto()


@dataclass(slots=True, eq=False)
class Request:
    """`prefix` has one entry per whole block before the tail: its leased page, or None.

    `spare` are own pages in no table yet. `attempt` is the highest one heard of, `drawn_attempt`
    the one under which pages of the reservation were drawn, 0 if none were.
    A `spoilt` one has lost pages: what a step makes of it is worth nothing. Until
    its first token is sampled a request has one choice, the stem, from which the n
    choices fork. `scored` are the log-probabilities of its prompt, where they are asked for.
    """

    opening: Opening
    session: FrameSink
    attempt: int
    phase: Phase = Phase.RESERVING
    prefix: list[Page | None] = field(default_factory=list)
    spare: list[Page] = field(default_factory=list)
    own: set[Page] = field(default_factory=set)
    choices: list[Choice] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    finished: int = 0
    forked: bool = False
    computes_prefix: bool = False
    drawn_attempt: int = 0
    ready_sent: bool = False
    spoilt: bool = False
    computed_prompt_tokens: int = 0
    scored: list[Logprobs] = field(default_factory=list)
    credit: int | None = field(init=False)
    handover: Stoppable | None = None
    prompt: tuple[int, ...] = field(init=False)
    opened_ns: int = 0
    ready_ns: int = 0
    first_token_ns: int = 0
    matcher: Matcher | None = None
    # When the last step ended that it was in, and when its router said that nobody waits for it.
    last_step_ns: int = 0
    cancelled_ns: int = 0

    def __post_init__(self) -> None:
        self.credit = self.opening.credit
        self.prompt = self.opening.tokens[: len(self.opening.tokens) - self.opening.generated]

    @property
    def handoff_id(self) -> str:
        return self.opening.handoff_id

    @property
    def arrival(self) -> tuple[int, str]:
        """The order of precedence; the id breaks ties alike everywhere."""
        return (self.opening.arrival_unix_ns, self.opening.handoff_id)

    @property
    def closing(self) -> bool:
        """On its way out: it is in no step, and nothing may be taken for it."""
        return self.phase is Phase.CLOSING

    @property
    def sequences(self) -> int:
        return len(self.choices) if self.forked else self.opening.n - len(self.dropped)

    @property
    def filling(self) -> bool:
        """Whether its prompt is being computed here."""
        return self.phase is Phase.RUNNING and self.computes_prefix and not self.forked

    @property
    def scoring(self) -> bool:
        """Whether what is computed now is a prompt whose tokens are to be scored."""
        return self.opening.prompt_logprobs is not None and not self.forked

    @property
    def missing_blocks(self) -> int:
        return sum(page is None for page in self.prefix)

    def reserved(self, have: Sequence[Page], extra: Iterable[Page]) -> None:
        """The reservation was granted: `have` are blocks 0 .. len(have), leased."""
        self.prefix = [*have, *[None] * (self.opening.prefix_blocks - len(have))]
        self.spare = list(extra)
        self.own = set(self.spare)
        if self.phase is Phase.RESERVING:
            self.phase = Phase.HANDING_OVER

    def arrived(self, blocks: Iterable[tuple[int, Page]], page_tokens: int) -> None:
        """Blocks that someone committed are now leased to this request.

        While this worker computes the prefix itself, a block that it has written
        already keeps its page here; its own commit will learn of the other one.
        """
        for index, page in blocks:
            if self.prefix[index] is not None:
                continue
            self.prefix[index] = page
            if self.computes_prefix and self.choices and index * page_tokens >= self.choices[0].computed:
                self.choices[0].table[index] = page
        if self.choices and not self.forked:
            self.skip_leased(page_tokens)

    def begin(self, page_tokens: int, drawn: Mapping[int, Page], attempt: int = 0) -> None:
        """Makes the stem, at the first block that is not leased; `drawn` has a page for each of those.

        They were drawn from the reservation by `attempt`, or are own ones of this worker (0).
        """
        table = [page if page is not None else drawn[index] for index, page in enumerate(self.prefix)]
        stem = Choice(
            index=self.opening.first_choice,
            tokens=list(self.opening.tokens),
            table=table,
            computed=0,
            generated=self.opening.generated,
            chained=0,
            last_id=self.opening.root_id,
            credit=self.credit,
            matcher=self.matcher,
        )
        self.choices = [stem]
        self.computes_prefix = bool(drawn)
        self.drawn_attempt = attempt if drawn else 0
        self.phase = Phase.RUNNING
        self.skip_leased(page_tokens)

    def begin_alone(self, page_tokens: int, extra: int, take: Take) -> bool:
        """Begins on own pages for every missing block, with `extra` more; False if there are not as many."""
        missing = [index for index, page in enumerate(self.prefix) if page is None]
        pages = take(len(missing) + extra)
        if pages is None:
            return False
        self.own.update(pages)
        self.spare.extend(pages[len(missing) :])
        self.begin(page_tokens, dict(zip(missing, pages, strict=False)))
        return True

    def skip_leased(self, page_tokens: int) -> None:
        """Moves the stem over blocks that need no computing."""
        stem = self.choices[0]
        while (
            stem.chained < len(self.prefix)
            and stem.computed == stem.chained * page_tokens
            and self.prefix[stem.chained] is not None
        ):
            stem.last_id = self.opening.block_ids[stem.chained]
            stem.chained += 1
            stem.computed += page_tokens

    def piece(self, page_tokens: int, limit: int) -> int:
        """Prompt tokens that the stem may compute in one step of at most `limit`.

        Whole blocks while more remains than the limit; never into a leased block.
        """
        stem = self.choices[0]
        end = min(len(stem.tokens), stem.computed + limit)
        if end < len(stem.tokens):
            end -= end % page_tokens
        for index in range(stem.computed // page_tokens, len(self.prefix)):
            if self.prefix[index] is not None:
                end = min(end, index * page_tokens)
                break
        return end - stem.computed

    def fork(self, copies: Sequence[Page], page_tokens: int) -> None:
        """Makes n choices out of the stem; `copies` of its unfinished page, if it has one, are theirs."""
        stem = self.choices[0]
        for place in range(1, self.opening.n):
            page = copies[place - 1] if copies else None
            self.choices.append(stem.fork(stem.index + place, page, page_tokens))
        self.forked = True

    def grow(self, choice: Choice, blocks: int, take: Take) -> bool:
        """Extends the table to `blocks` pages; all or nothing."""
        need = blocks - len(choice.table)
        pages = self.pages(need, take)
        if pages is None:
            return False
        choice.table.extend(pages)
        return True

    def pages(self, need: int, take: Take) -> list[Page] | None:
        """`need` own pages: first those set aside, then from the worker's grant."""
        if need <= 0:
            return []
        short = need - len(self.spare)
        if short > 0:
            taken = take(short)
            if taken is None:
                return None
            self.own.update(taken)
            self.spare.extend(taken)
        pages = self.spare[:need]
        del self.spare[:need]
        return pages

    def settle(self, blocks: Sequence[FullBlock], winners: Sequence[Page]) -> list[Page]:
        """A commit was answered. Returns own pages that lost to an earlier committer.

        To be called between steps only, because tables change.
        """
        losers: list[Page] = []
        for block, winner in zip(blocks, winners, strict=True):
            self.own.discard(block.page)
            if block.index < len(self.prefix):
                self.prefix[block.index] = winner
            if winner == block.page:
                continue
            losers.append(block.page)
            for choice in self.choices:
                if block.index < len(choice.table) and choice.table[block.index] == block.page:
                    choice.table[block.index] = winner
        return losers

    def end_choice(self, choice: Choice) -> list[Page]:
        """Takes a choice out. Returns its own pages that nothing else needs.

        Full blocks stay: they may be on their way to the store.
        """
        self.choices.remove(choice)
        loose = [page for page in choice.table[choice.chained :] if page in self.own]
        self.own.difference_update(loose)
        return loose

    def add_credit(self, tokens: int) -> None:
        if self.credit is not None:
            self.credit += tokens
        for choice in self.choices:
            if choice.credit is not None:
                choice.credit += tokens
