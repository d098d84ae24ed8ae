"""One run: the blocks of one prompt, which of them are here, and which come next.

Pure: knows neither gRPC nor torch nor the store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh.blocks import ID_BYTES, chain
from mesh.errors import InternalError, InvalidRequest
from mesh.kv.page import CommitItem, Drawn, Page


@dataclass(frozen=True, slots=True)
class Order:
    """What a router asks for. `tokens` are those of the whole blocks; `have` blocks decode holds already.

    `reserves`: decode is on another node, so the run reserves its pages here itself.
    """

    request_id: str
    handoff_id: str
    attempt: int
    capability: str
    tokens: tuple[int, ...]
    block_ids: tuple[bytes, ...]
    root_id: bytes
    have: int
    arrival_unix_ns: int
    reserves: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks `first` .. `end` of a run, computed in one step."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`committed_blocks` from the start without a gap; `queue_s` only on the first."""

    committed_blocks: int
    computed_tokens: int
    queue_s: float | None = None


@dataclass(slots=True, eq=False)
class Run:
    """`pages[i]` is the page of block i, to read once `committed[i]`, to write before."""

    order: Order
    queued_at_s: float
    pages: list[Page | None] = field(default_factory=list)
    committed: list[bool] = field(default_factory=list)
    computed_tokens: int = 0
    started: bool = False
    left: bool = False
    lost: bool = False
    last_turn: int = 0
    # When the last chunk ended, and when its caller left.
    last_step_ns: int = 0
    left_ns: int = 0
    entered_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        self.pages = [None] * len(self.order.block_ids)
        self.committed = [False] * len(self.order.block_ids)

    @property
    def arrival(self) -> tuple[int, str]:
        return (self.order.arrival_unix_ns, self.order.handoff_id)

    @property
    def committed_blocks(self) -> int:
        """Committed from the start without a gap."""
        return self.committed.index(False) if False in self.committed else len(self.committed)

    @property
    def missing_blocks(self) -> int:
        return self.committed.count(False)

    def look(self, drawn: Drawn) -> None:
        """What the store has of this run now."""
        for index, page in drawn.committed:
            self.pages[index] = page
            self.committed[index] = True
        for index, page in drawn.writable:
            if not self.committed[index]:
                self.pages[index] = page

    def next_chunk(self, most_blocks: int) -> Chunk | None:
        """The first missing blocks, up to the next one that is here; None when all are."""
        first = self.committed_blocks
        if first == len(self.committed):
            return None
        end = first
        while end < len(self.committed) and not self.committed[end] and end - first < most_blocks:
            end += 1
        return Chunk(first, end)

    def table(self, chunk: Chunk) -> list[int]:
        """Page indices of the blocks up to the end of a chunk."""
        pages = [page.index for page in self.pages[: chunk.end] if page is not None]
        if len(pages) != chunk.end:
            raise InternalError("the store gave no page for a block of this run")
        return pages

    def items(self, chunk: Chunk) -> list[CommitItem]:
        """The blocks of a computed chunk, to be committed."""
        items: list[CommitItem] = []
        for index in range(chunk.first, chunk.end):
            page = self.pages[index]
            assert page is not None
            parent = self.order.block_ids[index - 1] if index else self.order.root_id
            items.append(CommitItem(page, self.order.block_ids[index], parent))
        return items

    def settle(self, chunk: Chunk, winners: Sequence[Page]) -> list[Page]:
        """A commit was answered. Returns the pages that lost to an earlier committer."""
        losers: list[Page] = []
        for index, winner in zip(range(chunk.first, chunk.end), winners, strict=True):
            page = self.pages[index]
            if page is not None and page != winner:
                losers.append(page)
            self.pages[index] = winner
            self.committed[index] = True
        return losers


def check(order: Order, *, page_tokens: int, vocab_size: int, context_length: int) -> None:
    """Raises InvalidRequest for an order that cannot be computed."""
    if not order.block_ids:
        raise InvalidRequest("there is no block to compute", param="block_ids")
    if len(order.tokens) != len(order.block_ids) * page_tokens:
        raise InvalidRequest(
            f"{len(order.tokens)} tokens are not {len(order.block_ids)} blocks of {page_tokens}",
            param="prompt",
        )
    if min(order.tokens) < 0 or max(order.tokens) >= vocab_size:
        raise InvalidRequest(f"a token id is not below {vocab_size}", param="prompt")
    if len(order.tokens) >= context_length:
        raise InvalidRequest(
            f"the prompt has over {len(order.tokens)} tokens and the model reads {context_length}",
            code="context_length_exceeded",
            param="prompt",
        )
    if any(len(item) != ID_BYTES for item in (*order.block_ids, order.root_id)):
        raise InvalidRequest(f"a block id has {ID_BYTES} bytes", param="block_ids")
    if order.have > len(order.block_ids):
        raise InvalidRequest("more blocks are there than the prompt has", param="from")


def check_chain(order: Order, page_tokens: int) -> None:
    """Raises InvalidRequest unless the ids are those of the tokens.

    A page under the wrong id would be a wrong answer for whoever finds it later.
    """
    if tuple(chain(order.root_id, order.tokens, page_tokens)) != order.block_ids:
        raise InvalidRequest("the block ids are not those of the prompt", param="block_ids")
