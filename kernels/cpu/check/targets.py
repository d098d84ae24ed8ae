"""Compiles the core's checks for a target and runs them: this machine, aarch64 in qemu, WebAssembly in Node.

The digests must be the same everywhere. Knows nothing of what is checked.
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.build import COMMON, Unit, compile_objects, core_units, find_compiler, link

HERE = Path(__file__).resolve().parent
_ZIG = (sys.executable, "-m", "ziglang", "c++")


@dataclass(frozen=True, slots=True)
class Target:
    """How to make a program for it, and how to run that here."""

    name: str
    machine: str
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    runner: tuple[str, ...]


class MissingTool(Exception):
    """This machine cannot make or run programs for the target; the message names what is missing."""


def native(extra: Sequence[str] = ()) -> Target:
    """This machine, with the compiler that the module is built with."""
    return Target("native", platform.machine(), find_compiler(), tuple(extra), ())


def aarch64() -> Target:
    """Linux on 64-bit ARM with the dot product, in qemu's user mode. Raises MissingTool."""
    _need_zig()
    flags = ("-target", "aarch64-linux-musl", "-static")
    return Target("aarch64", "aarch64", _ZIG, flags, (_need("qemu-aarch64-static", "qemu-aarch64"),))


def wasm() -> Target:
    """WebAssembly with 128-bit vectors, in Node. Raises MissingTool."""
    _need_zig()
    flags = ("-target", "wasm32-wasi", "-msimd128")
    runner = (_need("node"), "--no-warnings", str(HERE / "run_wasi.mjs"))
    return Target("wasm", "wasm32", _ZIG, flags, runner)


def compile_check(target: Target, folder: Path) -> Path:
    """The program for the target. Raises BuildError."""
    own = Unit(HERE / "check.cpp", ("-O2", "-fno-exceptions", "-fno-rtti", f"-I{HERE.parent / 'core'}"))
    shared = tuple(flag for flag in COMMON if target.name != "wasm" or flag not in ("-fPIC", "-pthread"))
    units = [
        Unit(unit.source, (*shared, *unit.flags, *target.flags))
        for unit in [*core_units(target.machine), own]
    ]
    program = folder / f"check-{target.name}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = compile_objects(target.compiler, units, Path(scratch))
        link([*target.compiler, *target.flags], objects, program)
    return program


def run_check(target: Target, program: Path, isa: str) -> list[str]:
    """The lines of digests of one instruction set. Raises RuntimeError where a check fails."""
    done = subprocess.run(
        [*target.runner, str(program), isa], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{target.name} {isa}: {done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def _need(*programs: str) -> str:
    for program in programs:
        found = shutil.which(program)
        if found:
            return found
    raise MissingTool(f"there is no {programs[0]} on this machine")


def _need_zig() -> None:
    if importlib.util.find_spec("ziglang") is None:
        raise MissingTool("the Python package 'ziglang' is not installed")
