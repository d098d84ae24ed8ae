"""How fast the engine is on this machine: `python -m bench.engine --model PATH [--threads N] [--json]`.

    pp512_tok_s         prompt processing, 512 tokens in one step, no logits
    tg64_b1_tok_s …     generation: 64 steps of 1, 4 and 16 sequences, all their tokens per second
    tg32_d1024_tok_s …  generation of one sequence at a depth
    *_gb_s              bytes of weights and pages that the steps had to read
    peak_memory_gb_s    what one thread reads here from memory that no cache holds

Medians over `--repeats` runs by the wall clock; `--best` takes the best run, where neighbours are busy.
Knows nothing of services.
"""

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import engine
from engine import Executor, Slice

PROMPT_TOKENS = 512
STEPS = 64
DEEP_STEPS = 32


@dataclass(frozen=True, slots=True)
class Timing:
    repeats: int
    best: bool

    def seconds(self, job: Callable[[], object]) -> float:
        job()
        found = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            job()
            found.append(time.perf_counter() - start)
        return min(found) if self.best else statistics.median(found)


class Bench:
    """One loaded model and a pool that is large enough for the deepest run."""

    def __init__(self, model: Executor, timing: Timing, depths: Sequence[int]) -> None:
        self._model = model
        self._timing = timing
        self._depths = [d for d in depths if d + DEEP_STEPS <= model.info.context_length]
        self._layout = layout = model.info.layout
        deepest = layout.pages_for(max([PROMPT_TOKENS, *self._depths]) + DEEP_STEPS)
        self._pages = max(deepest, 16 * layout.pages_for(2 * STEPS))
        self._arena = mmap.mmap(-1, self._pages * layout.page_bytes)
        model.bind(self._arena, self._pages, layout.page_bytes)
        numbers = np.random.default_rng(0).integers(3, model.info.vocab_size, 16384)
        self._tokens = [int(token) for token in numbers]

    def run(self, batches: Sequence[int]) -> dict[str, float]:
        found: dict[str, float] = {}
        seconds = self._timing.seconds(lambda: self._prefill(PROMPT_TOKENS))
        found[f"pp{PROMPT_TOKENS}_tok_s"] = PROMPT_TOKENS / seconds
        for batch in batches:
            seconds = self._timing.seconds(lambda batch=batch: self._generate(batch, STEPS, STEPS))  # type: ignore[misc]
            found[f"tg{STEPS}_b{batch}_tok_s"] = batch * STEPS / seconds
            found[f"tg{STEPS}_b{batch}_gb_s"] = self._bytes(batch, STEPS, STEPS) / seconds / 1e9
        for depth in self._depths:
            self._prefill(depth)
            seconds = self._timing.seconds(lambda depth=depth: self._generate(1, depth, DEEP_STEPS))  # type: ignore[misc]
            found[f"tg{DEEP_STEPS}_d{depth}_tok_s"] = DEEP_STEPS / seconds
            found[f"tg{DEEP_STEPS}_d{depth}_gb_s"] = self._bytes(1, depth, DEEP_STEPS) / seconds / 1e9
        return found

    def _prefill(self, tokens: int) -> None:
        self._model.step([Slice(self._tokens[:tokens], 0, range(self._layout.pages_for(tokens)), 0)])

    def _generate(self, batch: int, depth: int, steps: int) -> None:
        each = self._layout.pages_for(depth + steps)
        tables = [range(i * each, (i + 1) * each) for i in range(batch)]
        for step in range(steps):
            token = self._tokens[step : step + 1]
            self._model.step([Slice(token, depth + step, table, 1) for table in tables])

    def _bytes(self, batch: int, depth: int, steps: int) -> float:
        """Weights once per step, and the pages of every sequence."""
        token_bytes = self._layout.page_bytes / self._layout.page_tokens
        return steps * (self._model.info.weights_bytes + batch * token_bytes * (depth + steps / 2))


def memory_gb_s() -> float:
    """Bytes read per second by one thread, from memory that no cache holds."""
    source = np.ones(1 << 25, np.float64)
    found = []
    for _ in range(5):
        start = time.perf_counter()
        source.max()
        found.append(time.perf_counter() - start)
    return source.nbytes / min(found) / 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="path of a GGUF file, or tiny:seed=1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--executor", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--kv-dtype", default="f16", choices=["f32", "f16", "bf16"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--depths", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--best", action="store_true", help="the best run instead of the median")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args(arguments)

    start = time.perf_counter()
    model = engine.load(
        options.model, threads=options.threads, kv_dtype=options.kv_dtype, executor=options.executor
    )
    loading_s = time.perf_counter() - start
    bench = Bench(model, Timing(options.repeats, options.best), options.depths)
    result: dict[str, object] = {
        "model": model.info.name,
        "numerics_id": model.info.numerics_id,
        "threads": options.threads,
        "kv_dtype": options.kv_dtype,
        "weights_bytes": model.info.weights_bytes,
        "load_s": loading_s,
        "peak_memory_gb_s": memory_gb_s(),
    }
    result |= bench.run(options.batches)
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:24} {value:,.2f}" if isinstance(value, float) else f"{key:24} {value}")


if __name__ == "__main__":
    main()
