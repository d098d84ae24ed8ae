"""What the engine can say is wrong.

    EngineError            a model that cannot be loaded or run: the message names the place
    ├── WeightError        the file lacks a tensor, or has one of a wrong shape, type or value
    └── ProgramError       an operation does not fit its operands; names operation and tensor

A failure of one request inside a step is no exception but a `SliceFailure` in its place
(see `engine.executor`), so that its neighbours are not touched.
"""


class EngineError(Exception):
    """A model cannot be loaded or a step cannot be run."""


class WeightError(EngineError):
    """A tensor is missing, has the wrong shape or type, or holds values that are no numbers."""


class ProgramError(EngineError):
    """An operation does not fit its operands."""
