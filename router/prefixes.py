"""Which node's store holds which blocks, as far as the news tell. A hint, never a promise.

Each store numbers its news. A gap means that something was missed: the node's set
is forgotten and asked for anew. Pure apart from that request; a wrong hint costs a
second look at the store, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

BLOCKS_PER_NODE_MAX = 4_000_000


@dataclass(frozen=True, slots=True)
class BlockNews:
    """Blocks that a node's store gained or lost, in the order of `sequence`."""

    node: str
    sequence: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _Node:
    sequence: int | None = None
    listing: bool = False
    blocks: set[bytes] = field(default_factory=set)
    # News that arrived while a listing is under way.
    later: list[BlockNews] = field(default_factory=list)


class PrefixIndex:
    """`list_blocks(node)` starts a full listing; its result comes back through `listed`."""

    def __init__(self, list_blocks: Callable[[str], None]) -> None:
        self._list_blocks = list_blocks
        self._nodes: dict[str, _Node] = {}

    def heard(self, news: BlockNews) -> None:
        """Takes news; asks for a listing on a gap."""
        node = self._nodes.setdefault(news.node, _Node())
        if node.listing:
            node.later.append(news)
        elif node.sequence is not None and news.sequence <= node.sequence:
            return
        elif (node.sequence is not None and news.sequence == node.sequence + 1) or (
            node.sequence is None and news.sequence == 1
        ):
            self._apply(node, news)
        else:
            node.later = [news]
            self._ask(news.node, node)

    def listed(self, name: str, sequence: int, blocks: Iterable[bytes]) -> None:
        """Everything that the node's store had at `sequence`."""
        node = self._nodes.setdefault(name, _Node())
        node.blocks = set(blocks)
        node.sequence, node.listing = sequence, False
        later, node.later = node.later, []
        for news in sorted(later, key=lambda item: item.sequence):
            self.heard(news)

    def listing_failed(self, name: str) -> None:
        """The store did not answer; the next news ask again."""
        node = self._nodes.get(name)
        if node is not None:
            node.listing, node.sequence, node.later = False, None, []

    def forget(self, name: str) -> None:
        """The node's store is gone, or a new one."""
        self._nodes.pop(name, None)

    def held(self, name: str, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the node holds."""
        node = self._nodes.get(name)
        if node is None or not node.blocks:
            return 0
        for index, block in enumerate(block_ids):
            if block not in node.blocks:
                return index
        return len(block_ids)

    def _ask(self, name: str, node: _Node) -> None:
        node.listing = True
        self._list_blocks(name)

    def _apply(self, node: _Node, news: BlockNews) -> None:
        node.sequence = news.sequence
        node.blocks.difference_update(news.removed)
        if len(node.blocks) < BLOCKS_PER_NODE_MAX:
            node.blocks.update(news.stored)
