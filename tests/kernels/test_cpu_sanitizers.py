"""The kernel tests once more under AddressSanitizer and UBSan, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import find_compiler

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_under_sanitizers() -> None:
    compiler = find_compiler()
    if "ziglang" in compiler:
        pytest.skip("ziglang brings no sanitizers")
    libraries = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KVMESH_CPU_SANITIZE": "1",
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    tests = [
        "tests/kernels/test_cpu_products.py",
        "tests/kernels/test_cpu_attention.py",
        "tests/kernels/test_cpu_elementwise.py",
        "tests/kernels/test_cpu_refusals.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
