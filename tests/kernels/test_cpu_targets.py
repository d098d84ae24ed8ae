"""The core on targets that this machine only emulates, and built by another compiler: the same bits everywhere."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu.build import SANITIZERS
from kernels.cpu.check.targets import MissingTool, Target, aarch64, compile_check, native, run_check, wasm
from tests.kernels.cpu_programs import ISAS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of portable C++ on this machine."""
    target = native()
    program = compile_check(target, tmp_path_factory.mktemp("native"))
    lines = run_check(target, program, "portable")
    assert len(lines) > 20
    for isa in ISAS:
        assert run_check(target, program, isa) == lines, isa
    return lines


@pytest.mark.parametrize(("find", "isas"), [(aarch64, ["portable", "neon"]), (wasm, ["portable"])])
def test_another_machine_gives_the_same_bits(
    find: Callable[[], Target], isas: list[str], wanted: list[str], tmp_path: Path
) -> None:
    try:
        target = find()
    except MissingTool as error:
        pytest.skip(str(error))
    program = compile_check(target, tmp_path)
    for isa in isas:
        assert run_check(target, program, isa) == wanted, isa


def test_under_sanitizers(wanted: list[str], tmp_path: Path) -> None:
    target = native(SANITIZERS)
    if "ziglang" in target.compiler:
        pytest.skip("ziglang brings no sanitizers")
    program = compile_check(target, tmp_path)
    for isa in ISAS:
        assert run_check(target, program, isa) == wanted


def test_a_machine_without_a_compiler_builds_with_ziglang(tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the Python package 'ziglang' is not installed")
    code = """
import json
from kernels.cpu.build import build, find_compiler
from kernels.cpu import load
print(json.dumps([list(find_compiler()), str(build()), load().best_isa()]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "PATH": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiler, path, isa = json.loads(done.stdout)
    assert compiler[1:] == ["-m", "ziglang", "c++"]
    assert Path(path).exists()
    assert isa == ISAS[-1]
