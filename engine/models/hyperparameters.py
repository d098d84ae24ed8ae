"""Typed, bounded access to the hyper-parameters of a model file. Knows no architecture."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import EngineError


class Hyperparameters:
    """Keys are given without the architecture: `block_count` reads `llama.block_count`."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._architecture = architecture
        self._metadata = metadata

    def key(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def count(self, key: str, default: int | None = None, *, most: int = 1 << 24) -> int:
        """A whole number from 1 to `most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise EngineError(f"{self.key(key)} is {value!r}: a whole number from 1 to {most} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EngineError(f"{self.key(key)} is {value!r}: a number is needed")
        if not (math.isfinite(value) and value > 0):
            raise EngineError(f"{self.key(key)} is {value!r}: a finite number above 0 is needed")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise EngineError(f"{self.key(key)} is {value!r}: text is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise EngineError(f"{self.key(key)} is {value!r}: a truth value is needed")
        return value

    def one_of(self, key: str, known: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in known:
            raise EngineError(f"{self.key(key)} is {value!r}, which is not known (known: {', '.join(known)})")
        return value

    def has(self, key: str) -> bool:
        return self._metadata.get(self.key(key)) is not None

    def refuse(self, key: str, *, unless: object = None) -> None:
        """Raises if the file sets a key that would change the result and is not supported."""
        value = self._metadata.get(self.key(key))
        if value is not None and value != unless:
            raise EngineError(f"{self.key(key)} is {value!r}, which is not supported")

    @property
    def context_length(self) -> int:
        return self.count("context_length")

    def _get(self, key: str, default: object) -> Any:
        value = self._metadata.get(self.key(key), default)
        if value is None:
            raise EngineError(f"{self.key(key)} is missing")
        return value
