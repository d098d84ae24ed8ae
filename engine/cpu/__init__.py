"""The `cpu` executor: a typed program lowered to the C++ core, one call per step. Imports no torch.

packed.py     a model's weights in the core's packed forms: pack.py what they are, packing.py makes them,
              pack_file.py and pack_cache.py keep them on disk
shelf.py      hands them to the core
lower.py      typed operations to the core's operations
executor.py   the executor
"""

from engine.cpu.executor import CpuExecutor
from engine.cpu.pack_cache import PackCache

__all__ = ["CpuExecutor", "PackCache"]
