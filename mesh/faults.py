"""Places at which a test makes things go wrong on purpose.

A process has fault points only if its mesh was started with `--fault-points`; else
every point is passed for free and no rule is ever read. The rules lie in a file
beside the process's configuration, read when it gets SIGUSR2. A rule names a point,
what to do there and at which passing. Signals are sent from here; what else a rule
asks is for the place itself to do. This module does not know what happens at a point.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Action(StrEnum):
    """`kill` and `hang` are signals, to this process or to another one."""

    KILL = "kill"
    HANG = "hang"
    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"
    # Intact bytes of another page; bytes that the page held in an earlier life.
    FOREIGN = "foreign"
    STALE = "stale"


_SIGNALS = frozenset({Action.KILL, Action.HANG})

# Every point, and what can be asked there beside signals.
POINTS: Mapping[str, frozenset[Action]] = {
    # In a router, once per placement of a request (streaming: per row after the first).
    "queued": frozenset({Action.DELAY}),
    "prefilling": frozenset(),
    "handing_over": frozenset(),
    "first_token": frozenset(),
    "streaming": frozenset(),
    # What a router hears of a prefill run.
    "progress": frozenset({Action.DROP}),
    # Frames of a router to a decode worker that may come twice.
    "sources": frozenset({Action.DUPLICATE}),
    "cancel": frozenset({Action.DUPLICATE}),
    # In a worker, before each of these.
    "chunk": frozenset({Action.DELAY}),
    "step": frozenset({Action.DELAY}),
    # A prefill worker's commit; what is corrupted is the page, after it.
    "commit": frozenset({Action.DELAY, Action.DROP, Action.DUPLICATE, Action.CORRUPT}),
    # A page that a KV store sends to another node's.
    "page_sent": frozenset(
        {Action.DROP, Action.DUPLICATE, Action.CORRUPT, Action.TRUNCATE, Action.FOREIGN, Action.STALE}
    ),
    # A reservation's news that a KV store tells a worker: which blocks it now has.
    "page_leased": frozenset({Action.DELAY, Action.DUPLICATE}),
}


class BadRule(Exception):
    """A rule that means nothing; the message says why."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`action` at passings `nth`, `nth` + `every`, … (`every` 0: once) of `point`, `times` at most.

    `pid` is who gets the signal (0: this process), `seconds` how long a delay is.
    """

    point: str
    action: Action
    nth: int = 1
    every: int = 0
    times: int = 1
    pid: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Rule:
        """Raises BadRule."""
        try:
            rule = cls(**{**said, "action": Action(said["action"])})
        except (KeyError, TypeError, ValueError) as error:
            raise BadRule(f"{said}: {error}") from error
        able = POINTS.get(rule.point)
        if able is None:
            raise BadRule(f"there is no point {rule.point!r}; there are {', '.join(POINTS)}")
        if rule.action not in able | _SIGNALS:
            raise BadRule(f"{rule.action} cannot be done at {rule.point}")
        if rule.nth < 1 or rule.every < 0 or rule.times < 1 or rule.seconds < 0:
            raise BadRule(f"{said}: numbers out of range")
        return rule


@dataclass(frozen=True, slots=True)
class Fault:
    """What a place is to do to what passes it."""

    action: Action
    seconds: float


class FaultPoints:
    """The points of one process. Off until `load` has found rules."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._left: list[int] = []
        self._passed: list[int] = []
        self._fired: Path | None = None

    @property
    def active(self) -> bool:
        """Whether there is any rule."""
        return bool(self._rules)

    def load(self, rules: Path, fired: Path) -> None:
        """Takes the rules in a file: a JSON list, or no file for none. `fired` gets a line per fault."""
        try:
            found = [Rule.of(said) for said in json.loads(rules.read_bytes())]
        except FileNotFoundError:
            found = []
        except (BadRule, OSError, ValueError, TypeError) as error:
            log.error("fault rules are refused: %s", error)
            found = []
        self._rules, self._fired = found, fired
        self._left = [rule.times for rule in found]
        self._passed = [0] * len(found)

    def at(self, point: str) -> Fault | None:
        """To be called where `point` is passed. Sends signals itself, returns what else is asked."""
        if not self._rules:
            return None
        asked: Fault | None = None
        for number, rule in enumerate(self._rules):
            if rule.point == point and self._due(number, rule):
                self._tell(rule)
                if rule.action in _SIGNALS:
                    _signal(rule)
                else:
                    asked = Fault(rule.action, rule.seconds)
        return asked

    async def delay(self, point: str) -> None:
        """`at`, for places that can only be delayed."""
        fault = self.at(point)
        if fault is not None and fault.action is Action.DELAY:
            await asyncio.sleep(fault.seconds)

    def _due(self, number: int, rule: Rule) -> bool:
        self._passed[number] += 1
        beyond = self._passed[number] - rule.nth
        due = beyond == 0 or (beyond > 0 and rule.every > 0 and beyond % rule.every == 0)
        if not due or not self._left[number]:
            return False
        self._left[number] -= 1
        return True

    def _tell(self, rule: Rule) -> None:
        assert self._fired is not None
        line = f"{time.time_ns()} {rule.point} {rule.action} {rule.pid or os.getpid()}\n"
        handle = os.open(self._fired, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


NO_FAULTS = FaultPoints()


def rules_file(run_dir: Path, name: str) -> Path:
    """Where the rules of a process lie."""
    return run_dir / f"{name}.faults.json"


def fired_file(run_dir: Path, name: str) -> Path:
    """Where a process writes a line for each fault: time in unix ns, point, action, pid."""
    return run_dir / f"{name}.faults.fired"


def _signal(rule: Rule) -> None:
    try:
        os.kill(rule.pid or os.getpid(), signal.SIGKILL if rule.action is Action.KILL else signal.SIGSTOP)
    except ProcessLookupError:
        log.warning("fault: process %d is gone", rule.pid)
