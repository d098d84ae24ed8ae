"""Which worker gets a request. Pure: no sockets, no tasks, no clock.

A decode worker is chosen by what it would cost: the sequences that it already
runs, plus an eighth of one for each block of the prompt that its node's store does
not hold. So a cached prefix decides between equally busy workers, and load decides
in the end. Equal costs go to the worker that was chosen least recently, which
spreads an idle mesh's requests round robin; routers begin that round at different
workers. A worker that refused is full until something happens (a request of ours
ends, news of its load) and is then tried with one request before it is open again.

Load is what the worker last said of itself plus what this router has given it
since, and never less than what this router has with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

MISSING_BLOCK_COST = 0.125
# In sequences of prefill: what it costs that pages travel between nodes.
OTHER_NODE_COST = 1.0


class Gate(Enum):
    """Whether a worker takes requests, as far as we know."""

    OPEN = auto()
    PROBING = auto()
    FULL = auto()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of itself."""

    running: int
    waiting: int
    free_pages: int


@dataclass(slots=True)
class Worker:
    """One decode or prefill worker. `capacity` is in sequences; 0 is unknown."""

    name: str
    role: str
    node: str
    model: str
    fingerprint: bytes
    capacity: int
    connected: bool = False
    draining: bool = False
    gate: Gate = Gate.OPEN
    probes: int = 0
    ours: int = 0
    report: LoadReport | None = None
    ours_at_report: int = 0
    chosen: float = 0.0

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    @property
    def load(self) -> int:
        """Sequences that the worker runs or has waiting."""
        if self.report is None:
            return self.ours
        said = self.report.running + self.report.waiting + self.ours - self.ours_at_report
        return max(said, self.ours)

    def takes(self, sequences: int) -> bool:
        if not self.usable or self.gate is Gate.FULL:
            return False
        if self.gate is Gate.PROBING and self.probes:
            return False
        # One that is idle decides itself whether a request can ever fit.
        return not self.capacity or not self.ours or self.ours + sequences <= self.capacity


# How many leading blocks of the prompt the node of a worker holds.
Held = Callable[[Worker], int]


class Placement:
    """All workers that this router knows, and the choice between them."""

    def __init__(self, seed: int | None = None) -> None:
        self._workers: dict[str, Worker] = {}
        self._draw = random.Random(seed)  # noqa: S311
        self._turn = 0

    def put(self, worker: Worker) -> Worker:
        """Adds a worker, or updates what is said about one that is known; what is ours stays."""
        known = self._workers.get(worker.name)
        if known is None or known.role != worker.role:
            worker.chosen = -self._draw.random()
            self._workers[worker.name] = worker
            return worker
        known.node, known.model = worker.node, worker.model
        known.fingerprint, known.capacity = worker.fingerprint, worker.capacity
        known.draining = worker.draining
        return known

    def remove(self, name: str) -> None:
        self._workers.pop(name, None)

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def workers(self, role: str, model: str | None = None) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role and model in (None, w.model)]

    def served(self, model: str) -> bool:
        """Whether any decode worker of the model can be reached."""
        return any(w.usable for w in self.workers("decode", model))

    def choose_decode(self, model: str, sequences: int, blocks: int, held: Held) -> Worker | None:
        """The cheapest decode worker that takes `sequences` more now, or None."""
        candidates = [w for w in self.workers("decode", model) if w.takes(sequences)]
        if len({w.node for w in candidates}) < 2:
            return self._cheapest(candidates, lambda worker: worker.load)
        return self._cheapest(
            candidates, lambda worker: worker.load + MISSING_BLOCK_COST * (blocks - held(worker))
        )

    def choose_prefill(self, decode: Worker, exclude: Iterable[str] = ()) -> Worker | None:
        """The least loaded prefill worker whose pages the decode worker can use, or None.

        One of another node counts as a little busier: its pages have to travel.
        """
        tried = set(exclude)
        candidates = [
            w
            for w in self.workers("prefill", decode.model)
            if w.usable and w.fingerprint == decode.fingerprint and w.name not in tried
        ]
        return self._cheapest(
            candidates, lambda worker: worker.load + OTHER_NODE_COST * (worker.node != decode.node)
        )

    def taken(self, worker: Worker, sequences: int) -> None:
        """A request goes to the worker."""
        worker.ours += sequences
        if worker.gate is Gate.PROBING:
            worker.probes += 1

    def ended(self, worker: Worker, sequences: int) -> None:
        """It has ended there, however it did."""
        worker.ours = max(0, worker.ours - sequences)
        worker.probes = max(0, worker.probes - 1)
        self.stir(worker)

    def accepted(self, worker: Worker) -> None:
        """The worker has reserved for a request: it is not full."""
        worker.gate, worker.probes = Gate.OPEN, 0

    def refused(self, worker: Worker) -> None:
        """The worker has no room now."""
        worker.gate, worker.probes = Gate.FULL, 0

    def stir(self, worker: Worker) -> bool:
        """Something happened there: a full worker may be tried again. True if it was full."""
        if worker.gate is not Gate.FULL:
            return False
        worker.gate, worker.probes = Gate.PROBING, 0
        return True

    def said(self, name: str, report: LoadReport) -> None:
        """News of a worker's load."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.report, worker.ours_at_report = report, worker.ours
            self.stir(worker)

    def _cheapest(self, candidates: list[Worker], cost: Callable[[Worker], float]) -> Worker | None:
        if not candidates:
            return None
        worker = min(candidates, key=lambda w: (cost(w), w.chosen))
        self._turn += 1
        worker.chosen = self._turn
        return worker
