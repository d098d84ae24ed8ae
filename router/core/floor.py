"""Where a request's work is done, and what a placement must know of the request around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mesh.faults import NO_FAULTS, FaultPoints
from router.admission import Admission
from router.fleet import Fleet
from router.prefill_runs import RunPatience
from router.pulse import Pulse

Mint = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Floor:
    """Where work is done: workers, the queue in front of them, and the router's signature.

    `mint(claims)` signs a capability; `name` is unique to this router process.
    """

    fleet: Fleet
    admission: Admission
    mint: Mint
    name: str
    run_patience: RunPatience
    pulse: Pulse = field(default_factory=Pulse)
    # A run that has committed everything without the decode worker noticing.
    handover_s: float = 10.0
    faults: FaultPoints = NO_FAULTS
    # A transfer that goes on when the run is complete; one that stalls is given up by its store.
    transfer_s: float = 25.0
    placements: Iterator[int] = field(default_factory=lambda: count(1))


@dataclass(frozen=True, slots=True)
class Origin:
    """What a placement needs to know of the request around it."""

    request_id: str
    organisation: str
    salt: bytes
    arrival_ns: int
    end_ids: frozenset[int]
    traceparent: str = ""
