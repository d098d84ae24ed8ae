"""What the service is told beside what every service is told.

| option | default | what |
|---|---|---|
| ttl_s | 2592000 (30 days) | how long a response is kept |
| total_bytes | 1073741824 | for all organisations; above it new responses are refused |
| organisation_bytes | 268435456 | for one organisation; above it its own oldest go first |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mesh.config import ConfigError


@dataclass(frozen=True, slots=True)
class ShelfOptions:
    """How much is kept, and for how long."""

    ttl_s: float = 30 * 86400.0
    total_bytes: int = 1 << 30
    organisation_bytes: int = 256 << 20


def shelf_options(options: Mapping[str, Any]) -> ShelfOptions:
    """Raises ConfigError that names the option."""
    known = {field.name for field in fields(ShelfOptions)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"options: unknown to responses: {name}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"options.{name}: expected a number above 0")
    return ShelfOptions(**options)
