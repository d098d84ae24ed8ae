"""Recorded answers of the real service, where they are at hand, and how answers are compared with them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RECORDINGS = (
    Path(os.environ.get("KVMESH_CASES", Path(__file__).parents[2] / "shared" / "cases")) / "openai-recordings"
)


@dataclass(frozen=True, slots=True)
class Recording:
    """One exchange. `text` is the body of the answer; header names are in small letters."""

    path: str
    body: dict[str, Any]
    status: int
    headers: dict[str, str]
    text: str

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


def recording(name: str) -> Recording:
    exchange = yaml.safe_load((RECORDINGS / f"{name}.yaml").read_text(encoding="utf-8"))["interactions"][0]
    request, response = exchange["request"], exchange["response"]
    return Recording(
        request["url"].removeprefix("https://api.openai.com"),
        json.loads(request["body"]),
        response["code"],
        {key.lower(): values[0] for key, values in response["headers"].items()},
        response["body"],
    )


def shape(value: Any) -> Any:
    """Keys and kinds, not values: numbers are one kind. Padding against traffic analysis is left out."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key != "obfuscation"}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    if value is None or isinstance(value, (bool, str)):
        return type(value).__name__
    return "number"


def kinds(chunks: list[Any]) -> list[str]:
    """The shapes of a stream's chunks in their order, keys in theirs; equal ones in a row are one."""
    found: list[str] = []
    for chunk in chunks:
        kind = json.dumps(shape(chunk))
        if found[-1:] != [kind]:
            found.append(kind)
    return found
