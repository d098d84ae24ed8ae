"""Who works on which response, and whose word to stop has not been heard yet. Pure, in memory.

A hold lives as long as the stream of the router that works on the response.
"""

from __future__ import annotations

import asyncio


class Holds:
    """By response. The second holder of one response replaces nobody: it is refused."""

    def __init__(self) -> None:
        self._cancelled: dict[str, asyncio.Event] = {}

    def take(self, response_id: str) -> asyncio.Event | None:
        """An event that is set when the response is cancelled; None if somebody holds it already."""
        if response_id in self._cancelled:
            return None
        event = asyncio.Event()
        self._cancelled[response_id] = event
        return event

    def drop(self, response_id: str) -> None:
        self._cancelled.pop(response_id, None)

    def cancel(self, response_id: str) -> None:
        """Tells the holder, if there is one."""
        event = self._cancelled.get(response_id)
        if event is not None:
            event.set()
