"""What a program needs of weights, wherever they come from: names, shapes, float32 values, a digest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class WeightSource(Protocol):
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Row-major shape of every tensor."""

    def load(self, name: str) -> Floats:
        """The whole tensor. Raises WeightError where a value is not finite."""

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        """Some rows of a matrix, without expanding the others. [len(rows), columns]"""

    def check(self, name: str) -> None:
        """As `load`, but only for the error that it may raise."""

    def digest(self) -> bytes:
        """BLAKE2b-128 of the content."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model before it is built: what its file says, and its weights."""

    name: str
    architecture: str
    metadata: Mapping[str, Any]
    """Keys as in GGUF: `general.architecture`, `llama.block_count`, …"""
    weights: WeightSource
    padding_ids: tuple[int, int] = (0, 0)
    """Ids [first, end) that only fill the vocabulary up and are never to be chosen."""
