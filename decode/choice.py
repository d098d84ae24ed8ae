"""One sequence in generation: its tokens, its page table, and when it ends.

Pure. `computed` counts the tokens whose keys and values lie in the pages; after
each sampled step it is one less than the number of tokens, because the newest
token has not been through the model yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode.frames import Finish, Logprobs, Row
from decode.opening import Opening
from engine.sampling import Sampled
from mesh.blocks import block_id
from mesh.kv.page import Page
from text.grammar import Matcher


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block all of whose tokens are accepted and computed, ready to be committed."""

    index: int
    page: Page
    block_id: bytes
    parent_id: bytes


@dataclass(slots=True, eq=False)
class Choice:
    """`table` has one page per block up to the last one written. `credit` None is no limit.

    `matcher` is where the tokens are in the grammar of the answer, None without one.
    """

    index: int
    tokens: list[int]
    table: list[Page]
    computed: int
    generated: int
    chained: int
    last_id: bytes
    credit: int | None
    matcher: Matcher | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the next step feeds: 1 while generating, more while prompt is left."""
        return len(self.tokens) - self.computed

    @property
    def paused(self) -> bool:
        return self.credit == 0

    def room(self, opening: Opening, context_length: int) -> int:
        """How many more tokens may be appended."""
        room = min(opening.max_tokens - self.generated, context_length - len(self.tokens))
        return room if self.credit is None else min(room, self.credit)

    def accept(
        self,
        sampled: Sequence[Sampled],
        drafts: Sequence[int],
        opening: Opening,
        context_length: int,
    ) -> Row:
        """Appends what the step decided.

        `sampled[i]` is the token drawn after `drafts[:i]`. A draft is right if it is
        the token drawn in its place; the first wrong one ends the row, and so does
        the end of the choice.
        """
        taken: list[int] = []
        logprobs: list[Logprobs] = []
        finish: Finish | None = None
        for place, item in enumerate(sampled):
            taken.append(item.token)
            if item.logprob is not None:
                logprobs.append(Logprobs(item.logprob, item.top))
            finish = self._append(item.token, opening, context_length)
            if finish is not None or (place < len(drafts) and drafts[place] != item.token):
                break
        self.computed = len(self.tokens) - 1
        # A complete grammar ends a choice without a token for it.
        stop = taken[-1] if finish is Finish.STOP and taken[-1] in opening.stop_ids else None
        return Row(opening.handoff_id, self.index, tuple(taken), tuple(logprobs), finish, stop)

    def _append(self, token: int, opening: Opening, context_length: int) -> Finish | None:
        self.tokens.append(token)
        self.generated += 1
        if self.credit is not None:
            self.credit -= 1
        if token in opening.stop_ids:
            return Finish.STOP
        if self.matcher is not None:
            self.matcher.take([token])
            if self.matcher.complete:
                return Finish.STOP
        if self.generated >= opening.max_tokens or len(self.tokens) >= context_length:
            return Finish.LENGTH
        return None

    def complete_blocks(self, page_tokens: int) -> list[FullBlock]:
        """Names the blocks that have become full since the last call."""
        blocks: list[FullBlock] = []
        while (self.chained + 1) * page_tokens <= self.computed:
            start = self.chained * page_tokens
            name = block_id(self.last_id, self.tokens[start : start + page_tokens])
            blocks.append(FullBlock(self.chained, self.table[self.chained], name, self.last_id))
            self.chained += 1
            self.last_id = name
        return blocks

    def fork(self, index: int, page: Page | None, page_tokens: int) -> Choice:
        """A copy for another choice of the same request.

        Whole pages are shared; `page` holds a copy of the unfinished one, None when
        there is none.
        """
        whole = self.computed // page_tokens
        table = self.table[:whole] if page is None else [*self.table[:whole], page]
        matcher = self.matcher.copy() if self.matcher is not None else None
        return replace(self, index=index, tokens=list(self.tokens), table=table, matcher=matcher)
