"""Reads what a process's metrics port answers, as far as it is ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^(kvmesh_[a-z_]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

Samples = list[tuple[str, Mapping[str, str], float]]


def parse_samples(text: str) -> Samples:
    """Name, labels and value of every sample of ours."""
    return [
        (name, dict(_LABEL.findall(labels or "")), float(value))
        for name, labels, value in _SAMPLE.findall(text)
    ]


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all label sets that have `labels`."""
    return sum(
        value
        for sample, found, value in samples
        if sample == name and all(found.get(k) == v for k, v in labels.items())
    )
