"""Architectures: one file each, about a page, named as the field names it.

A new architecture is a function `build(b, h, logits)` and one line here. Adding one touches nothing else.
"""

from collections.abc import Callable, Iterable

from engine.errors import EngineError, ProgramError
from engine.models import gemma3, llama, qwen2, qwen3
from engine.models.hyperparameters import Hyperparameters
from engine.program import Builder, Program
from engine.weights.source import ModelSource

ARCHITECTURES: dict[str, Callable[[Builder, Hyperparameters, bool], Program]] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}
# Of two sets of divisors a model uses one, and a head that is tied needs no matrix of its own.
_MAY_BE_UNUSED = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})


def build(model: ModelSource, *, logits: bool = True) -> tuple[Program, Hyperparameters]:
    """The typed program of a model. Raises EngineError for an unknown architecture or a bad hyper-parameter,
    ProgramError for tensors that do not fit or that the architecture has no place for."""
    architecture = ARCHITECTURES.get(model.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise EngineError(f"architecture {model.architecture!r} is not known (known: {known})")
    hyper = Hyperparameters(model.architecture, model.metadata)
    builder = Builder(model.weights.shapes)
    program = architecture(builder, hyper, True)
    _all_used(model.weights.shapes, builder.used)
    if not logits:
        program = architecture(Builder(model.weights.shapes), hyper, False)
    return program, hyper


def _all_used(found: Iterable[str], used: frozenset[str]) -> None:
    """A tensor that nothing reads is a bias or a norm that would be missing from every answer."""
    strays = sorted(set(found) - used - _MAY_BE_UNUSED)
    if strays:
        more = f" and {len(strays) - 3} more" if len(strays) > 3 else ""
        raise ProgramError(
            f"the architecture has no place for tensor {', '.join(map(repr, strays[:3]))}{more}"
        )
