"""What a prefill worker is told: one frozen dataclass, built from the options of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mesh.config import ConfigError
from mesh.processors import ANY, parse


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """`threads` compute, held to `cpus` (`any`, or such as `0,1`).

    `max_runs` may be queued; `drain_s` is how long they may go on after a stop.
    `protect_pages` is for tests: a stray write into a committed page ends the process.
    """

    threads: int = 1
    cpus: str = ANY
    executor: str = "cpu"
    kv_dtype: str = "f16"
    page_tokens: int = 16
    max_runs: int = 256
    drain_s: float = 8.0
    protect_pages: bool = False


def prefill_options(options: Mapping[str, Any]) -> PrefillOptions:
    """Strict: an unknown option or a value out of range is a ConfigError that names it."""
    values = asdict(PrefillOptions())
    for name, value in options.items():
        if name not in values:
            raise ConfigError(f"options: unknown to a prefill worker: {name}")
        kind = type(values[name])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (not value and kind is not bool) or (kind is not str and value < 0):
            raise ConfigError(f"options.{name}: expected a {kind.__name__} above 0, found {value!r}")
        values[name] = value
    try:
        parse(values["cpus"])
    except ValueError as error:
        raise ConfigError(f"options.cpus: {error}") from error
    return PrefillOptions(**values)
