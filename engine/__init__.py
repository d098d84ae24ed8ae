"""The engine: models as typed programs, weights, paging, steps, sampling.

`load` is the way in. Importing this package imports no torch: a scripted model never needs it.
"""

from engine.errors import EngineError, ProgramError, WeightError
from engine.executor import EngineInfo, Executor, Slice, SliceFailure, SliceMeta
from engine.load import load
from engine.paging import CacheGroup, PageGeometry, Plane

__all__ = [
    "CacheGroup",
    "EngineError",
    "EngineInfo",
    "Executor",
    "PageGeometry",
    "Plane",
    "ProgramError",
    "Slice",
    "SliceFailure",
    "SliceMeta",
    "WeightError",
    "load",
]
