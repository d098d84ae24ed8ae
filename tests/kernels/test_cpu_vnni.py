"""Products for AVX-512 with VNNI on any x86-64: the instructions spelt out in plain C++, the results beside the
portable kernels, bit for bit."""

import platform
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import load
from kernels.cpu.build import HERE, Unit, compile_objects, core_units, find_compiler

TESTS = Path(__file__).parent


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86-64 only")
@pytest.mark.skipif(not load().has_isa("avx2"), reason="what is not a product runs as AVX2")
def test_products_give_the_bits_of_the_portable_kernels(tmp_path: Path) -> None:
    compiler = find_compiler()
    include = (f"-I{HERE / 'core'}", f"-I{HERE / 'module'}")
    plain = f'-DKV_PLAIN_AVX512="{TESTS / "plain_avx512.h"}"'
    flags = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-fast-math")
    units = [
        Unit(unit.source, (*flags, *include))
        for unit in core_units()
        if unit.source.stem in ("isa_portable", "pack")
    ]
    units += [
        Unit(HERE / "core" / "isa_vnni.cpp", (*flags, "-mavx2", "-mfma", "-mf16c", plain)),
        Unit(HERE / "module" / "agreement.cpp", (*flags, *include)),
        Unit(TESTS / "vnni_agreement.cpp", (*flags, *include)),
    ]
    program = tmp_path / "agreement"
    objects = compile_objects(compiler, units, tmp_path)
    subprocess.run([*compiler, *map(str, objects), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
