"""What a decode worker says to a router, before it is protobuf. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from mesh.errors import MeshError


class Finish(Enum):
    """Why a choice ended."""

    STOP = auto()
    LENGTH = auto()


class Refusal(Enum):
    """Why a request was not taken."""

    NO_PAGES = auto()
    BUSY = auto()
    DRAINING = auto()
    INVALID = auto()
    NO_STORE = auto()


class Ending(Enum):
    """Why a request that was taken is over."""

    FINISHED = auto()
    CANCELLED = auto()
    PREEMPTED = auto()
    FAILED = auto()
    MOVED = auto()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one position: the token that was taken, and alternatives (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one choice. `logprobs` is empty or has one entry per token.

    `prompt_logprobs` is on the first row of a scored request: one per prompt token after the first.
    """

    handoff_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish: Finish | None = None
    stop_token_id: int | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """`alone`: the store is away and this worker computes the rest itself."""

    handoff_id: str
    have: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    handoff_id: str
    reason: Refusal
    error: MeshError


@dataclass(frozen=True, slots=True)
class Ready:
    handoff_id: str


@dataclass(frozen=True, slots=True)
class SourcesFailed:
    """The sources of an attempt will not deliver."""

    handoff_id: str
    attempt: int
    error: MeshError


@dataclass(frozen=True, slots=True)
class Step:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Done:
    handoff_id: str
    ending: Ending
    computed_prompt_tokens: int
    error: MeshError | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    steps: int
    running: int
    waiting: int


Frame = Reserved | Refused | Ready | SourcesFailed | Step | Done | Beat


class FrameSink(Protocol):
    """The router's end of a session."""

    @property
    def congested(self) -> bool:
        """Too much is unsent: its requests pause until it has drained."""

    def send(self, frame: Frame) -> None:
        """Queues a frame; never blocks. Frames of a session that is gone are dropped."""
