"""The `cpu` executor: a typed program lowered to the C++ core, one call per step. Imports no torch.

shelf.py      weights in the core's packed forms
lower.py      typed operations to the core's operations
executor.py   the executor
"""

from engine.cpu.executor import CpuExecutor

__all__ = ["CpuExecutor"]
