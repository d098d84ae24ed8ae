"""What a decode worker is told: one frozen dataclass, built from the options of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mesh.config import ConfigError
from mesh.processors import ANY, parse


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """`threads` compute, held to `cpus` (`any`, or such as `0,1`).

    `max_seqs` choices run at once, `step_tokens` rows make a step at most. `pace_s`, if any, is how far apart
    steps begin while prompts are being computed on the same processors.

    `drain_s` is how long running requests may go on after a stop. `protect_pages` is for
    tests: a stray write into a committed page ends the process.
    """

    threads: int = 1
    cpus: str = ANY
    executor: str = "cpu"
    kv_dtype: str = "f16"
    page_tokens: int = 16
    max_seqs: int = 64
    step_tokens: int = 256
    pace_s: float = 0.0
    drain_s: float = 8.0
    protect_pages: bool = False

    def __post_init__(self) -> None:
        if self.step_tokens < self.max_seqs + self.page_tokens:
            raise ConfigError(
                f"options.step_tokens is {self.step_tokens}: every one of {self.max_seqs} sequences"
                f" and one tail of {self.page_tokens} tokens must fit into a step"
            )


def decode_options(options: Mapping[str, Any]) -> DecodeOptions:
    """Strict: an unknown option or a value out of range is a ConfigError that names it."""
    values = asdict(DecodeOptions())
    for name, value in options.items():
        if name not in values:
            raise ConfigError(f"options: unknown to a decode worker: {name}")
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
    return DecodeOptions(**values)
