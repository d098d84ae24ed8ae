"""A model for a benchmark: the file behind its source, loaded, with errors that say what is wrong.

Knows nothing of what is measured.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import engine
from bench.command import BenchError
from engine import EngineError, Executor
from mesh.models import ModelSourceError, resolve
from text.errors import TextError


def add_model_arguments(parser: argparse.ArgumentParser, *, model: str | None) -> None:
    """`--model` and how to load it."""
    shown = f" (default {model})" if model else ""
    parser.add_argument(
        "--model",
        default=model,
        metavar="SOURCE",
        help=f"a path, pkg:NAME, hf:OWNER/REPO or tiny:seed=N{shown}",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default 1)")
    parser.add_argument("--executor", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--kv-dtype", default="f16", help="numbers in KV pages (default f16)")


@dataclass(frozen=True, slots=True)
class Loaded:
    executor: Executor
    load_s: float


def load_model(arguments: argparse.Namespace, *, executor: str | None = None) -> Loaded:
    """Raises BenchError where the model cannot be had or loaded."""
    start = time.perf_counter()
    try:
        model = engine.load(
            model_path(arguments.model),
            threads=arguments.threads,
            kv_dtype=arguments.kv_dtype,
            executor=executor or arguments.executor,
        )
    except (EngineError, TextError) as error:
        raise BenchError(f"{arguments.model}: {error}") from error
    return Loaded(model, time.perf_counter() - start)


def model_path(source: str) -> str:
    """May download: says so on standard error. Raises BenchError."""
    cache = Path(os.environ.get("KVMESH_STATE", ".kvmesh")) / "cache"

    def progress(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        return resolve(source, cache, progress=progress).path
    except ModelSourceError as error:
        raise BenchError(str(error)) from error
