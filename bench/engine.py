"""How fast the engine is on this machine, beside what the machine could do.

  pp512_tok_s          prompt processing: 512 tokens in one step, logits of the last
  tg64_tok_s           generation: 64 steps of one sequence
  tg64_b16_tok_s       the same for 16 sequences, all their tokens together
  tg32_d1024_tok_s     32 steps of one sequence at a depth (8192 means: up to the end of such a context)
  tg64_step_spread_ms  p99 - p50 of the time of a step at batch 1
  …_gop_s, …_gb_s      what that takes: integer products, or bytes of weights and pages read
  …_peak_pct           percent of what this machine was measured to give in the same run:
  peak_int8_gop_s        integer dot products in registers, with the same instructions
  peak_read_gb_s         reading as many bytes as the weights have, again and again

Medians over --repeats runs by the wall clock; --best takes the best run, for where neighbours are busy.
"""

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from bench import peak
from bench.command import BenchError, Row
from bench.loaded import Loaded, add_model_arguments, load_model
from engine import EngineError, Executor, Slice
from kernels.cpu import load as load_core

STEPS = 64
DEEP_STEPS = 32


@runtime_checkable
class Counted(Protocol):
    """An executor that knows its instruction set and how much its products compute."""

    @property
    def isa(self) -> str: ...
    @property
    def multiply_adds(self) -> tuple[int, int]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, model="pkg:smollm2")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="default 512")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 1024, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--best", action="store_true", help="the best run instead of the median")


def run(arguments: argparse.Namespace) -> Row:
    loaded = load_model(arguments)
    info = loaded.executor.info
    context = info.context_length
    prompt = min(arguments.prompt, context)
    depths = [d for d in arguments.depths if d <= context and context >= 2 * DEEP_STEPS]
    batches = arguments.batches if context >= 2 * STEPS else []
    if min([prompt, arguments.repeats, *batches]) < 1 or min([0, *depths]) < 0:
        raise BenchError("prompt, batches and repeats must be at least 1, depths at least 0")
    bench = _Bench(loaded, _Timing(arguments.repeats, arguments.best), prompt, batches, depths)
    row: dict[str, object] = {
        "model": info.name,
        "numerics_id": info.numerics_id,
        "threads": arguments.threads,
        "kv_dtype": info.kv_dtype,
        "cpu": _processor(),
        "load_average": os.getloadavg()[0],
        "weights_bytes": info.weights_bytes,
        "load_s": loaded.load_s,
    }
    try:
        return row | bench.peaks(arguments.threads) | bench.run()
    except EngineError as error:
        raise BenchError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Timing:
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


class _Bench:
    """One loaded model and a pool that is large enough for the deepest run."""

    def __init__(
        self, loaded: Loaded, timing: _Timing, prompt: int, batches: Sequence[int], depths: Sequence[int]
    ) -> None:
        self._model: Executor = loaded.executor
        self._info = self._model.info
        self._timing = timing
        self._prompt_tokens = prompt
        self._batches = batches
        # What a depth begins at: the deepest ends where the context does.
        self._depths = {d: min(d, self._info.context_length - DEEP_STEPS) for d in depths}
        layout = self._layout = self._info.layout
        pages = max(
            layout.pages_for(max([prompt, *self._depths.values()]) + DEEP_STEPS),
            max([1, *batches]) * layout.pages_for(2 * STEPS),
        )
        self._arena = mmap.mmap(-1, pages * layout.page_bytes)
        self._model.bind(self._arena, pages, layout.page_bytes)
        numbers = np.random.default_rng(0).integers(3, self._info.vocab_size, max(prompt, 16384))
        self._tokens = [int(token) for token in numbers]
        self._step_s: list[float] = []
        self._int8_gop_s: float | None = None
        self._read_gb_s: float | None = None

    def peaks(self, threads: int) -> dict[str, object]:
        if not isinstance(self._model, Counted):
            return {}
        core = load_core()
        self._int8_gop_s = peak.int8_gop_s(core, self._model.isa, threads)
        self._read_gb_s = peak.read_gb_s(core, self._info.weights_bytes, threads)
        row: dict[str, object] = {"isa": self._model.isa, "peak_read_gb_s": self._read_gb_s}
        return row if self._int8_gop_s is None else {**row, "peak_int8_gop_s": self._int8_gop_s}

    def run(self) -> dict[str, object]:
        found: dict[str, object] = {}
        tokens = self._prompt_tokens
        seconds = self._timing.seconds(lambda: self._prefill(tokens))
        key = f"pp{tokens}"
        found[f"{key}_tok_s"] = tokens / seconds
        found |= self._computed(key, tokens, 1, seconds)
        for batch in self._batches:
            seconds = self._timing.seconds(lambda batch=batch: self._generate(batch, STEPS, STEPS))  # type: ignore[misc]
            key = f"tg{STEPS}" if batch == 1 else f"tg{STEPS}_b{batch}"
            found[f"{key}_tok_s"] = batch * STEPS / seconds
            found |= self._read(key, batch, STEPS, STEPS, seconds)
            if batch == 1:
                found[f"{key}_step_spread_ms"] = self._spread_ms()
            if batch > 1:
                found |= self._computed(key, batch * STEPS, batch * STEPS, seconds)
        for depth, start in self._depths.items():
            if start:
                self._prefill(start)
            seconds = self._timing.seconds(lambda start=start: self._generate(1, start, DEEP_STEPS))  # type: ignore[misc]
            key = f"tg{DEEP_STEPS}_d{depth}"
            found[f"{key}_tok_s"] = DEEP_STEPS / seconds
            found |= self._read(key, 1, start, DEEP_STEPS, seconds)
        return found

    def _prefill(self, tokens: int) -> None:
        self._model.step([Slice(self._tokens[:tokens], 0, range(self._layout.pages_for(tokens)), 1)])

    def _generate(self, batch: int, depth: int, steps: int) -> None:
        each = self._layout.pages_for(depth + steps)
        tables = [range(i * each, (i + 1) * each) for i in range(batch)]
        self._step_s.clear()
        for step in range(steps):
            token = self._tokens[step : step + 1]
            start = time.perf_counter()
            self._model.step([Slice(token, depth + step, table, 1) for table in tables])
            self._step_s.append(time.perf_counter() - start)

    def _spread_ms(self) -> float:
        """Of the last generation."""
        ordered = sorted(self._step_s)
        return (ordered[-1 - len(ordered) // 100] - ordered[len(ordered) // 2]) * 1e3

    def _computed(self, key: str, rows: int, logit_rows: int, seconds: float) -> dict[str, float]:
        """The products alone: attention is not counted."""
        if not isinstance(self._model, Counted):
            return {}
        per_row, per_logit_row = self._model.multiply_adds
        gop_s = 2 * (rows * per_row + logit_rows * per_logit_row) / seconds / 1e9
        return {f"{key}_gop_s": gop_s, **_percent(f"{key}_int8_peak_pct", gop_s, self._int8_gop_s)}

    def _read(self, key: str, batch: int, depth: int, steps: int, seconds: float) -> dict[str, float]:
        """Weights once per step, and the pages of every sequence."""
        token_bytes = self._layout.page_bytes / self._layout.page_tokens
        nbytes = steps * (self._info.weights_bytes + batch * token_bytes * (depth + (steps + 1) / 2))
        gb_s = nbytes / seconds / 1e9
        return {f"{key}_gb_s": gb_s, **_percent(f"{key}_read_peak_pct", gb_s, self._read_gb_s)}


def _percent(key: str, value: float, of: float | None) -> dict[str, float]:
    return {} if of is None else {key: 100 * value / of}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{os.cpu_count()} x {names[0] if names else 'unknown'}"
