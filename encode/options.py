"""What an encode worker is told beside what every service is told.

| option | default | what |
|---|---|---|
| threads | 1 | of the matrix products; set before numpy is loaded |
| step_tokens | 2048 | computed together at most |
| waiting_tokens | 1048576 | that may wait; what comes on top is refused |
| drain_s | 8 | for running calls at the end |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mesh.config import ConfigError


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """Built once, from the service's configuration."""

    threads: int = 1
    step_tokens: int = 2048
    waiting_tokens: int = 1 << 20
    drain_s: float = 8.0


def encode_options(options: Mapping[str, Any]) -> EncodeOptions:
    """Raises ConfigError that names the option."""
    known = {field.name for field in fields(EncodeOptions)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"options: unknown to an encode worker: {name}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"options.{name}: expected a number above 0")
    return EncodeOptions(**options)
