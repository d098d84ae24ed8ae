"""`kvmesh trace`: one request's spans as a tree, with where its time went."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mesh.cli.failure import Failure
from mesh.cli.running import state_of
from mesh.cli.style import paint
from mesh.telemetry.reading import StoredSpan, read_trace

_BAR = 40


def run(arguments: argparse.Namespace) -> int:
    state = state_of(arguments.state)
    wanted = _latest(state.traces) if arguments.id == "last" else arguments.id
    spans = read_trace(state.root, wanted)
    if not spans:
        raise Failure(
            f"no trace {wanted}: spans arrive about a second after the request, and old ones are dropped"
        )
    if arguments.json:
        for span in spans:
            print(json.dumps(asdict(span)))
        return 0
    print(f"trace {spans[0].trace_id}\n")
    print("\n".join(tree(spans)))
    return 0


def tree(spans: Sequence[StoredSpan]) -> list[str]:
    """A line per span: indented name, when it began, how long it took, and a bar."""
    known = {span.span_id for span in spans}
    children: dict[str | None, list[StoredSpan]] = defaultdict(list)
    for span in spans:
        children[span.parent_id if span.parent_id in known else None].append(span)
    begin, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    width = max((end - begin), 1)
    lines: list[str] = []

    def add(span: StoredSpan, depth: int) -> None:
        label = "  " * depth + span.name
        first = (span.start_ns - begin) * _BAR // width
        length = max((span.end_ns - span.start_ns) * _BAR // width, 1)
        bar = (" " * first + "█" * length)[:_BAR].ljust(_BAR)
        took_ms, began_ms = (span.end_ns - span.start_ns) / 1e6, (span.start_ns - begin) / 1e6
        failed = "  " + paint(span.error, "red") if span.error else ""
        lines.append(
            f"{label:<34} {span.service:<18} +{began_ms:9.2f} {took_ms:9.2f} ms  {bar}{failed}".rstrip()
        )
        for child in sorted(children[span.span_id], key=lambda s: s.start_ns):
            add(child, depth + 1)

    for root in children[None]:
        add(root, 0)
    return lines


def _latest(directory: Path) -> str:
    latest: tuple[int, str] | None = None
    for path in directory.glob("*.jsonl"):
        with path.open("rb") as file:
            for line in file:
                try:
                    span = json.loads(line)
                    moment = (int(span["start_ns"]), str(span["trace_id"]))
                except (ValueError, KeyError, TypeError):
                    continue
                latest = max(latest, moment) if latest else moment
    if latest is None:
        raise Failure("there are no traces yet")
    return latest[1]
