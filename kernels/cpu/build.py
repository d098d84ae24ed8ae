"""Builds the CPU core into a Python module, on demand and once: `python -m kernels.cpu.build`.

Compiler: $CXX, g++, clang++, or the one in the package `ziglang`. The result lies in `_build/<key>/` beside
this file, where the key hashes sources, compiler, flags and Python's ABI; where that cannot be written,
in the user's cache. Several processes may build at once: one does, the others wait for it.

Knows nothing of what the core computes.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULE = "_kvmesh_cpu"

_STRICT = ("-Wall", "-Wextra", "-Werror")
# Every rounding is spelt out in the source; the compiler may not fuse any on its own.
COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-fast-math", "-pthread")
_CORE = ("-O3", "-fno-exceptions", "-fno-rtti", *_STRICT)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
_ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": (*_AVX2, "-mtune=haswell"),
        "vnni": (*_AVX2, *_AVX512, "-mtune=icelake-server"),
    },
    "aarch64": {"neon": ("-mcpu=generic+dotprod",)},
}
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)


class BuildError(Exception):
    """The core cannot be compiled here; the message holds what the compiler said."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One source and the flags it is compiled with."""

    source: Path
    flags: tuple[str, ...]


def find_compiler() -> tuple[str, ...]:
    """The command of a C++20 compiler. Raises BuildError where there is none."""
    chosen = os.environ.get("CXX")
    if chosen:
        return tuple(shlex.split(chosen))
    for name in ("g++", "clang++"):
        found = shutil.which(name)
        if found:
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise BuildError("there is no C++ compiler: install g++ or clang++, or the Python package 'ziglang'")


def core_units(machine: str = "") -> list[Unit]:
    """The core: what a test program links without Python. `machine` "": this one."""
    machine = machine or platform.machine()
    isa_flags = _ISA_FLAGS.get(_MACHINES.get(machine, machine), {})
    units = []
    for source in sorted((HERE / "core").glob("*.cpp")):
        isa = source.stem.removeprefix("isa_") if source.stem.startswith("isa_") else ""
        units.append(Unit(source, (*_CORE, *isa_flags.get(isa, ()))))
    return units


def module_units() -> list[Unit]:
    """The core, its threads, and the binding with nanobind's own source."""
    import nanobind

    binding = (
        "-O2",
        "-fno-strict-aliasing",
        "-ffunction-sections",
        "-fdata-sections",
        "-DNDEBUG",
        "-DNB_COMPACT_ASSERTIONS",
        f"-I{HERE / 'core'}",
        f"-isystem{nanobind.include_dir()}",
        f"-isystem{Path(nanobind.include_dir()).parent / 'ext' / 'robin_map' / 'include'}",
        f"-isystem{sysconfig.get_path('include')}",
    )
    units = core_units()
    units += [
        Unit(HERE / "module" / name, (*binding, *_STRICT))
        for name in ("module.cpp", "threads.cpp", "cpu.cpp", "agreement.cpp", "peak.cpp")
    ]
    units.append(Unit(Path(nanobind.source_dir()) / "nb_combined.cpp", (*binding, "-w")))
    return units


def build(*, sanitize: bool = False) -> Path:
    """The path of the module, compiled if it is not there yet. Raises BuildError."""
    compiler = find_compiler()
    extra = SANITIZERS if sanitize else ()
    units = [Unit(unit.source, (*COMMON, *unit.flags, *extra)) for unit in module_units()]
    folder = _folder() / _key(compiler, units)
    target = folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not target.exists():
                _compile(compiler, units, extra, target)
    return target


def compile_objects(compiler: Sequence[str], units: Sequence[Unit], folder: Path) -> list[Path]:
    """Object files of all units, compiled side by side."""

    def one(unit: Unit) -> Path:
        made = folder / f"{unit.source.stem}.o"
        _run([*compiler, *unit.flags, "-c", str(unit.source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        # The longest first.
        return list(pool.map(one, sorted(units, key=lambda unit: "-w" not in unit.flags)))


def _compile(compiler: Sequence[str], units: Sequence[Unit], extra: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = compile_objects(compiler, units, Path(scratch))
        linked = Path(scratch) / target.name
        link([*compiler, "-shared", "-pthread", *extra], objects, linked)
        linked.replace(target)


def link(command: Sequence[str], objects: Sequence[Path], target: Path) -> None:
    _run([*command, *map(str, objects), "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr or done.stdout}")


def _key(compiler: Sequence[str], units: Sequence[Unit]) -> str:
    digest = hashlib.blake2b(digest_size=10)
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for text in (*compiler, version, sysconfig.get_config_var("EXT_SUFFIX") or "", platform.machine()):
        digest.update(text.encode() + b"\0")
    for unit in units:
        digest.update("\0".join((*unit.flags, unit.source.name)).encode())
    for path in sorted(p for part in ("core", "module") for p in (HERE / part).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _folder() -> Path:
    here = HERE / "_build"
    try:
        here.mkdir(exist_ok=True)
        ignore = here / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
    except OSError:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "kvmesh" / "cpu"
    return here if os.access(here, os.W_OK) else Path.home() / ".cache" / "kvmesh" / "cpu"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(build(sanitize="--sanitize" in sys.argv[1:]))
