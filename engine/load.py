"""From a model source to an executor that is ready to be bound to its pages.

Sources: the path of a GGUF file, or of a directory with config.json and safetensors;
`tiny:seed=1[,layers=2][,context=4096]`, random weights for tests; `script:[text=PATH][,check=tail]`, a model
that says what it is told. Finding the file of a named model is not done here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import EngineError
from engine.executor import Executor
from engine.scripted import ScriptedExecutor
from engine.weights.known_digests import KnownDigests, Stamped
from engine.weights.source import ModelSource

Progress = Callable[[int, int], None]
"""Done, and of how much."""

NO_TORCH = (
    "the reference executor needs torch, which is not installed:"
    " .venv/bin/python -m pip install -c constraints.txt torch"
)


def load(
    source: str,
    *,
    threads: int = 1,
    page_tokens: int = 16,
    kv_dtype: str = "f16",
    logits: bool = True,
    executor: str = "cpu",
    cpus: Sequence[int] = (),
    cache: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> Executor:
    """Loads the model and checks everything that can be checked before a request comes.

    `logits` False leaves the output matrix out: for workers that never ask for logits. `executor` is "cpu"
    (the C++ core) or "reference" (torch, float32: the truth, where torch is installed).
    `cpus` holds the cpu executor's threads to these processors, in turn. Under `cache`, a directory,
    that executor keeps packed weights and maps them the next time; `progress` is told while it packs.

    Raises EngineError (or `text.errors.GgufError` for a file that cannot be read), naming the tensor, key or
    operation.
    """
    if threads < 1:
        raise EngineError(f"threads is {threads}: at least 1 is needed")
    if source.startswith("script:"):
        return ScriptedExecutor.of(source, page_tokens=page_tokens)
    if executor not in ("reference", "cpu"):
        raise EngineError(f"executor is {executor!r}: it must be reference or cpu")
    from engine.tiny import TinySpec, tiny_model

    model = tiny_model(TinySpec.parse(source)) if source.startswith("tiny:") else _open(Path(source))
    # Imported where they are used: only the reference needs torch, and a scripted model needs nothing.
    if executor == "cpu":
        from engine.cpu import CpuExecutor, PackCache

        in_files = isinstance(model.weights, Stamped)
        return CpuExecutor(
            model,
            threads=threads,
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
            logits=logits,
            cpus=cpus,
            content=_digest(model, cache),
            packs=PackCache(cache / "packs") if cache is not None and in_files else None,
            progress=progress,
        )
    try:
        from engine.reference import ReferenceExecutor
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise EngineError(NO_TORCH) from None

    return ReferenceExecutor(
        model, threads=threads, page_tokens=page_tokens, kv_dtype=kv_dtype, logits=logits
    )


def _digest(model: ModelSource, cache: Path | None) -> bytes:
    weights = model.weights
    if cache is None or not isinstance(weights, Stamped):
        return weights.digest()
    return KnownDigests(cache / "digests").digest(weights)


def _open(path: Path) -> ModelSource:
    if path.is_dir():
        from engine.weights.hf import open_directory

        return open_directory(path)
    from engine.weights.gguf import open_model

    return open_model(path)
