"""The CPU executor: near the reference, and the same bits whatever company, chunking, pages, threads, ISA."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import EngineError, Executor, Slice
from engine.cpu import CpuExecutor
from engine.executor import Logits
from engine.generate import generate
from engine.sampling import SamplingParams
from engine.tiny import TinySpec, tiny_model
from engine.weights.gguf import open_model
from kernels.cpu import load
from tests.engine.pools import bind, failure, rows, run, smollm2

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 256, 200)]
PAGES = list(range(3, 60))
ISAS = [isa for isa in ("portable", "avx2", "vnni", "neon") if load().has_isa(isa)]


def tiny(
    *,
    spec: str = "tiny:seed=3",
    threads: int = 1,
    page_tokens: int = 16,
    kv_dtype: str = "f32",
    isa: str | None = None,
    rows_at_once: int = 512,
    logits: bool = True,
) -> CpuExecutor:
    return CpuExecutor(
        tiny_model(TinySpec.parse(spec)),
        threads=threads,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        logits=logits,
        isa=isa,
        rows_at_once=rows_at_once,
    )


@pytest.fixture(scope="module")
def whole() -> Logits:
    executor = tiny()
    bind(executor, 64)
    return run(executor, TOKENS, PAGES, [len(TOKENS)])


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [("f32", 2e-4), ("f16", 2e-3), ("bf16", 2e-2), ("int8", 2e-2)]
)
def test_near_the_reference(kv_dtype: str, tolerance: float) -> None:
    """The same numbers lie in the pages of both; a number at a tie may be rounded the other way."""
    found = []
    for executor in (
        tiny(kv_dtype=kv_dtype),
        engine.load("tiny:seed=3", executor="reference", kv_dtype=kv_dtype),
    ):
        bind(executor, 64)
        found.append(run(executor, TOKENS, PAGES, [len(TOKENS)]))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunks", [[1] * 200, [7] * 28 + [4], [199, 1]])
def test_chunking_and_instruction_set(whole: Logits, isa: str, chunks: list[int]) -> None:
    executor = tiny(isa=isa)
    assert executor.isa == isa
    bind(executor, 64)
    assert run(executor, TOKENS, PAGES, chunks).tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("page_tokens", "threads", "rows_at_once"), [(1, 1, 512), (8, 2, 33), (64, 3, 1), (16, 2, 512)]
)
def test_pages_threads_and_parts_of_a_step(
    whole: Logits, page_tokens: int, threads: int, rows_at_once: int
) -> None:
    executor = tiny(page_tokens=page_tokens, threads=threads, rows_at_once=rows_at_once)
    bind(executor, 220, page_bytes=executor.info.layout.page_bytes + 64)
    pages = list(np.random.default_rng(5).permutation(220))
    assert run(executor, TOKENS, pages, [120, 1, 79]).tobytes() == whole.tobytes()


def test_company(whole: Logits) -> None:
    executor = tiny(threads=2)
    bind(executor, 128)
    others = [list(range(64 + 8 * i, 72 + 8 * i)) for i in range(8)]
    found = []
    for position, token in enumerate(TOKENS[:100]):
        company = [
            Slice(TOKENS[i : i + 1 + position % 9 * (i % 2)], 0, others[i], 1) for i in range(position % 8)
        ]
        place = position % (len(company) + 1)
        batch = [*company[:place], Slice([token], position, PAGES, 1), *company[place:]]
        found.append(rows(executor.step(batch)[place]))
    assert np.concatenate(found).tobytes() == whole[:100].tobytes()


def test_a_neighbour_that_fails(whole: Logits) -> None:
    executor = tiny()
    bind(executor, 64)
    batch = [
        Slice([5], 0, [999], 1),
        Slice(TOKENS, 0, PAGES, 200),
        Slice([5], 10, [1], 1),
        Slice([300], 0, [1]),
    ]
    results = executor.step(batch)
    assert "page index" in failure(results[0])
    assert rows(results[1]).tobytes() == whole.tobytes()
    # The third reads a page that nobody wrote: its numbers are no numbers, and only its.
    assert not np.isfinite(rows(results[2])[:, :261]).any()
    assert "vocabulary" in failure(results[3])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "int8"])
def test_pages_carry_everything(kv_dtype: str) -> None:
    """Pages that a worker without logits filled serve another one, of other threads and instruction set."""
    executor = tiny(kv_dtype=kv_dtype)
    bind(executor, 64)
    wanted = run(executor, TOKENS, PAGES, [200])
    writer = tiny(kv_dtype=kv_dtype, logits=False, threads=2, isa="portable")
    arena = bind(writer, 64)
    assert writer.step([Slice(TOKENS[:150], 0, PAGES, 0)]) == [None]
    assert "output matrix" in failure(writer.step([Slice(TOKENS[:1], 0, PAGES, 1)])[0])
    heir = tiny(kv_dtype=kv_dtype)
    heir.bind(arena, 64, heir.info.layout.page_bytes)
    assert heir.info.numerics_id == writer.info.numerics_id
    assert rows(heir.step([Slice(TOKENS[150:], 150, PAGES, 50)])[0]).tobytes() == wanted[150:].tobytes()


def test_padding_is_never_chosen(whole: Logits) -> None:
    assert (whole[:, 261:] == -1e30).all()


def test_an_abort_ends_the_step() -> None:
    executor = tiny(spec="tiny:seed=1,layers=64,context=65536")
    bind(executor, 4096)
    batch = [Slice([1] * 65536, 0, range(4096), 0)]
    timer = threading.Timer(0.1, executor.abort)
    timer.start()
    with pytest.raises(EngineError, match="aborted"):
        executor.step(batch)
    timer.join()
    assert executor.step([Slice([1], 0, [0], 0)]) == [None]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(EngineError, match="neon9"):
        tiny(isa="neon9")
    with pytest.raises(EngineError, match="bind"):
        tiny().step([Slice([1], 0, [0], 1)])
    with pytest.raises(EngineError, match="executor"):
        engine.load("tiny:seed=1", executor="gpu")


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, engine; engine.load('tiny:seed=1'); sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'protos'}"}
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=False).returncode == 0
    )


@pytest.mark.model
class TestRealWeights:
    @pytest.fixture(scope="class")
    def wanted(self) -> tuple[list[int], Logits]:
        tokens = [int(token) for token in np.random.default_rng(2).integers(0, 49000, 90)]
        executor = real()
        bind(executor, 24)
        return tokens, run(executor, tokens, range(8), [90])

    @pytest.mark.parametrize("chunks", [[64, 1, 20, 5], [3] * 30])
    def test_chunking(self, wanted: tuple[list[int], Logits], chunks: Sequence[int]) -> None:
        executor = real(threads=2)
        bind(executor, 24)
        assert run(executor, wanted[0], range(8), chunks).tobytes() == wanted[1].tobytes()

    def test_instruction_sets(self, wanted: tuple[list[int], Logits]) -> None:
        executor = real(isa="portable", threads=2)
        bind(executor, 24)
        found = run(executor, wanted[0][:20], range(8), [20])
        assert found.tobytes() == wanted[1][:20].tobytes()

    def test_generation(self) -> None:
        """As the reference generates, up to the first choice that is not clear."""
        executor: Executor = real()
        bind(executor, 24)
        prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
        assert generate(executor, prompt, SamplingParams(temperature=0), 1) == [7042]


def real(*, threads: int = 1, isa: str | None = None) -> CpuExecutor:
    return CpuExecutor(open_model(smollm2()), threads=threads, page_tokens=16, kv_dtype="f16", isa=isa)
