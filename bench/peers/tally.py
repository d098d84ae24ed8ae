"""Measurements and their medians. Knows nothing of what was measured."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Measurement:
    """`key` is `system.name.part.figure_unit`."""

    key: str
    value: float
    at_unix_s: float

    def line(self) -> str:
        return json.dumps(asdict(self))


def medians(found: Iterable[Measurement]) -> dict[str, object]:
    """Of each key; and `rounds`, the fewest measurements that any median rests on."""
    by_key: dict[str, list[float]] = defaultdict(list)
    for each in found:
        by_key[each.key].append(each.value)
    row: dict[str, object] = {key: statistics.median(values) for key, values in sorted(by_key.items())}
    return {"rounds": min(map(len, by_key.values()), default=0), **row}
