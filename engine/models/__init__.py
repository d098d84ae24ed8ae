"""Architectures: one file each, about a page, named as the field names it.

A new architecture is a function `build(b, h, logits)` and one line here. Adding one touches nothing else.
"""

from collections.abc import Callable

from engine.errors import EngineError
from engine.models import llama
from engine.models.hyperparameters import Hyperparameters
from engine.program import Builder, Program
from engine.weights.source import ModelSource

ARCHITECTURES: dict[str, Callable[[Builder, Hyperparameters, bool], Program]] = {
    "llama": llama.build,
}


def build(model: ModelSource, *, logits: bool = True) -> tuple[Program, Hyperparameters]:
    """The typed program of a model. Raises EngineError for an unknown architecture or a bad hyper-parameter,
    ProgramError for tensors that do not fit."""
    architecture = ARCHITECTURES.get(model.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise EngineError(f"architecture {model.architecture!r} is not known (known: {known})")
    hyper = Hyperparameters(model.architecture, model.metadata)
    return architecture(Builder(model.weights.shapes), hyper, logits), hyper
