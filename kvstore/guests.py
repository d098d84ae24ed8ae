"""Owners inside the store: what a transfer writes or reads while it runs.

To the page pool a transfer is a worker like any other: it draws, commits and leases,
may be overtaken by a later attempt, and loses everything when it ends. It has no
lock, for it cannot outlive the store.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore import recovery
from kvstore.arena import Arena

# Like a worker's, which are drawn: none can meet another. Counted, for a draw is a system call.
_EPOCHS = itertools.count(secrets.randbits(62) + 1)


@contextmanager
def guest(arena: Arena, name: str, settle: Callable[[Arena], None]) -> Iterator[int]:
    """The epoch of an owner that lives as long as the block does."""
    epoch = next(_EPOCHS)
    recovery.open_owner(arena.pool, epoch, name)
    try:
        yield epoch
    finally:
        recovery.bury(arena.pool, epoch)
        settle(arena)
