"""One kept response, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """Where a response is. The numbers are those in the database."""

    RUNNING = 1
    ENDED = 2
    CANCELLED = 3
    LOST = 4


@dataclass(frozen=True, slots=True)
class Record:
    """`response` and `input_items` are JSON that nobody here reads. An empty `previous_id`: the first."""

    id: str
    previous_id: str
    created: int
    state: State
    response: bytes
    input_items: bytes
    background: bool = False

    @property
    def size(self) -> int:
        """Bytes that count against the bounds."""
        return len(self.response) + len(self.input_items) + 256
