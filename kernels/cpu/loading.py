"""Finds or compiles the module and imports it. Knows nothing of what it does.

`KVMESH_CPU_SANITIZE=1` takes the build with AddressSanitizer and UBSan (for tests).
"""

import importlib.machinery
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import cast

from kernels.cpu.interface import Core


@cache
def revision() -> str:
    """Names the module's sources, compiler and flags: another one may pack weights in another way."""
    return _built().parent.name


@cache
def _built() -> Path:
    from kernels.cpu.build import build

    return build(sanitize=os.environ.get("KVMESH_CPU_SANITIZE") == "1")


@cache
def load() -> Core:
    """The compiled core. Raises `kernels.cpu.build.BuildError` where it cannot be compiled."""
    from kernels.cpu.build import MODULE

    path = _built()
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules.setdefault(MODULE, module)
    return cast(Core, module)
