"""What ends a command with a reason and an exit code."""

from __future__ import annotations

NOT_RUNNING = 3


class Failure(Exception):
    """The reason is for standard error; `status` is the exit code."""

    def __init__(self, reason: str, *, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status
