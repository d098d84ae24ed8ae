"""What an operator says of how models write, where that is not to be guessed from their templates.

One name for all models, or `MODEL=NAME` for some: `hermes`, or `a=hermes,b=json`. It knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mesh.config import ConfigError
from text import TextModel
from text.reasoning import MARKS
from text.tool_parsers import FORMATS

NONE = "none"


@dataclass(frozen=True, slots=True)
class Parsers:
    """By model; "" is every other model. `none` for reasoning takes nothing for it."""

    tools: Mapping[str, str] = field(default_factory=dict)
    reasoning: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str, text: TextModel) -> TextModel:
        """The text side of the model `name`, as its operator wants it."""
        tools = self.tools.get(name, self.tools.get("", text.tool_format))
        reasoning = self.reasoning.get(name, self.reasoning.get("", text.reasoning or NONE))
        return replace(text, tool_format=tools, reasoning=None if reasoning == NONE else reasoning)


def parsers_of(tools: object, reasoning: object) -> Parsers:
    """Of the options `tool_parser` and `reasoning_parser`; raises ConfigError."""
    return Parsers(
        _by_model("tool_parser", tools, set(FORMATS)),
        _by_model("reasoning_parser", reasoning, {*MARKS, NONE}),
    )


def _by_model(option: str, value: object, known: set[str]) -> dict[str, str]:
    if not isinstance(value, str):
        raise ConfigError(f"options.{option}: expected NAME or MODEL=NAME,…")
    chosen: dict[str, str] = {}
    for part in filter(None, value.split(",")):
        model, _, name = part.rpartition("=")
        if name.strip() not in known:
            raise ConfigError(f"options.{option}: {name.strip()!r} is none of {', '.join(sorted(known))}")
        chosen[model.strip()] = name.strip()
    return chosen
