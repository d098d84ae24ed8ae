"""Finds one trace again among the span files of all services."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUEST_ID = "kvmesh.request_id"
TRACES = "traces"


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span as it was written. Times in unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    kind: str
    start_ns: int
    end_ns: int
    error: str | None
    attributes: Mapping[str, Any]


def read_trace(state_dir: Path, wanted: str) -> list[StoredSpan]:
    """The spans of the trace with that id, or of the request with that id, by start time.

    Empty if there is none (any more).
    """
    wanted = wanted.strip()
    spans = list(_all(state_dir / TRACES))
    ids = {span.trace_id for span in spans if span.attributes.get(REQUEST_ID) == wanted}
    ids.add(wanted.lower())
    return sorted((span for span in spans if span.trace_id in ids), key=lambda span: span.start_ns)


def _all(directory: Path) -> Iterator[StoredSpan]:
    for path in sorted(directory.glob("*.jsonl")):
        try:
            with path.open("rb") as file:
                for line in file:
                    try:
                        yield StoredSpan(**json.loads(line))
                    except (ValueError, TypeError):
                        # The last line of a killed process may be half a line.
                        continue
        except OSError:
            continue
