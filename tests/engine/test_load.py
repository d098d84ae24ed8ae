"""Loading: what is refused, and that it is refused with a reason before anything runs."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import EngineError, Slice, WeightError
from engine.tiny import TinySpec, tiny_model
from engine.weights.gguf import open_model
from engine.weights.source import ModelSource
from tests.engine.pools import bind, failure, rows, run
from tests.text.gguf_builder import file, inferred, tensor
from text.errors import GgufError
from text.gguf import GgmlType

Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def arrays(source: ModelSource) -> Arrays:
    return {name: source.weights.load(name) for name in source.weights.shapes}


def write_gguf(
    path: Path, values: Arrays, metadata: dict[str, object], *, stored: dict[str, GgmlType] | None = None
) -> str:
    """A GGUF file; `stored` names tensors that are written as F16 or Q8_0 instead of F32."""
    described, data = [], b""
    for name, array in values.items():
        kind = (stored or {}).get(name, GgmlType.F32)
        described.append(tensor(name, array.shape[::-1], int(kind), len(data)))
        data += encode(array, kind)
        data += bytes(-len(data) % 32)
    pairs = [inferred(key, content) for key, content in metadata.items()]
    path.write_bytes(file(pairs, described, data))
    return str(path)


def encode(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], kind: GgmlType) -> bytes:
    if kind == GgmlType.F16:
        return array.astype(np.float16).tobytes()
    if kind == GgmlType.Q8_0:
        blocks = array.reshape(-1, 32)
        scales = (np.abs(blocks).max(1) / 127).astype(np.float16)
        codes = np.round(blocks / scales[:, None].astype(np.float32)).astype(np.int8)
        return b"".join(struct.pack("<e", s) + c.tobytes() for s, c in zip(scales, codes, strict=True))
    return array.tobytes()


def tiny_metadata() -> dict[str, object]:
    return {"general.architecture": "llama", **tiny_model(TinySpec(seed=5)).metadata}


@pytest.fixture
def values() -> Arrays:
    return arrays(tiny_model(TinySpec(seed=5)))


def test_a_file_gives_the_bits_of_the_weights_in_it(tmp_path: Path, values: Arrays) -> None:
    executor = engine.load(write_gguf(tmp_path / "m.gguf", values, tiny_metadata()))
    memory = engine.load("tiny:seed=5")
    tokens = list(range(97, 120))
    for one in (executor, memory):
        bind(one, 4)
    found, wanted = (run(one, tokens, range(4), [23]) for one in (executor, memory))
    # Ids that only fill the vocabulary up are known of the tiny model, not of the file.
    assert found[:, :261].tobytes() == wanted[:, :261].tobytes()
    assert executor.info.numerics_id == memory.info.numerics_id


def test_quantised_tensors_and_a_tied_output(tmp_path: Path, values: Arrays) -> None:
    del values["output.weight"]
    stored = {"blk.0.attn_q.weight": GgmlType.F16, "token_embd.weight": GgmlType.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", values, tiny_metadata(), stored=stored)
    executor = engine.load(path)
    bind(executor, 4)
    logits = run(executor, [1, 2, 3], range(4), [3])
    assert logits.shape == (3, 272)
    assert np.isfinite(logits).all()


def test_the_digest_is_of_the_content(tmp_path: Path, values: Arrays) -> None:
    one = open_model(Path(write_gguf(tmp_path / "a.gguf", values, tiny_metadata())))
    same = open_model(Path(write_gguf(tmp_path / "b.gguf", values, tiny_metadata())))
    values["blk.1.ffn_up.weight"][3, 3] += 1
    other = open_model(Path(write_gguf(tmp_path / "c.gguf", values, tiny_metadata())))
    assert one.weights.digest() == same.weights.digest() != other.weights.digest()
    assert len(one.weights.digest()) == 16


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, values: Arrays, value: float) -> None:
    values["blk.1.ffn_up.weight"][3, 3] = value
    path = write_gguf(tmp_path / "m.gguf", values, tiny_metadata())
    with pytest.raises(WeightError, match=r"'blk.1.ffn_up.weight'.*not finite"):
        engine.load(path)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, values: Arrays) -> None:
    name = "blk.0.attn_k.weight"
    path = Path(write_gguf(tmp_path / "m.gguf", values, tiny_metadata(), stored={name: GgmlType.Q8_0}))
    content = bytearray(path.read_bytes())
    block = encode(values[name], GgmlType.Q8_0)[:34]
    content[content.index(block) : content.index(block) + 2] = struct.pack("<e", np.nan)
    path.write_bytes(content)
    with pytest.raises(WeightError, match=r"'blk.0.attn_k.weight'"):
        engine.load(str(path))


def test_an_embedding_that_is_no_number_is_refused_too(tmp_path: Path, values: Arrays) -> None:
    values["token_embd.weight"][100, 0] = np.nan
    path = write_gguf(tmp_path / "m.gguf", values, tiny_metadata())
    with pytest.raises(WeightError, match=r"'token_embd.weight'"):
        engine.load(path)


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path, values: Arrays) -> None:
    name = "blk.0.ffn_up.weight"
    stored = {name: GgmlType.I32}
    path = write_gguf(tmp_path / "m.gguf", values, tiny_metadata(), stored=stored)
    with pytest.raises(WeightError, match=f"'{name}' is of type I32"):
        engine.load(path)


def test_a_truncated_file_is_refused(tmp_path: Path, values: Arrays) -> None:
    path = Path(write_gguf(tmp_path / "m.gguf", values, tiny_metadata()))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(GgufError, match=r"m.gguf"):
        engine.load(str(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tiny:seed=x", "'seed=x' is not understood"),
        ("tiny:sead=1", "'sead=1' is not understood"),
        ("tiny:layers=0", "at least 1"),
    ],
)
def test_a_scheme_that_is_not_understood(source: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine.load(source)


@pytest.mark.parametrize(
    "options", [{"page_tokens": 24}, {"page_tokens": 0}, {"kv_dtype": "i9"}, {"threads": 0}]
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        engine.load("tiny:seed=1", **options)  # type: ignore[arg-type]


def test_seeds_and_sizes_make_other_tiny_models() -> None:
    digests = {
        engine.load(source).info.weights_digest
        for source in ("tiny:seed=1", "tiny:seed=2", "tiny:seed=1,layers=3", "tiny:seed=1,context=64")
    }
    assert len(digests) == 4
    assert engine.load("tiny:seed=1").info.weights_digest in digests


def test_padding_of_the_vocabulary_is_never_likely() -> None:
    executor = engine.load("tiny:seed=1")
    bind(executor, 2)
    logits = run(executor, [65, 66], range(2), [2])
    assert np.isfinite(logits).all()
    assert logits[:, 261:].max() < logits[:, :261].min() - 1e6


@pytest.mark.parametrize(
    ("slice_", "message"),
    [
        (Slice([], 0, [0], 0), "no tokens"),
        (Slice([1], 0, [], 1), "0 pages are given where 1 are needed"),
        (Slice([1] * 17, 0, [0], 1), "1 pages are given where 2"),
        (Slice([1], 0, [4], 1), "outside the pool of 4"),
        (Slice([272], 0, [0], 1), "outside the vocabulary of 272"),
        (Slice([-1], 0, [0], 1), "outside the vocabulary"),
        (Slice([1], 0, [0], 2), "logits are asked for 2 of 1 rows"),
        (Slice([1] * 10, 60, range(4), 1), "leave the context of 64"),
        (Slice([1], -1, [0], 1), "leave the context"),
    ],
)
def test_a_slice_that_cannot_be_run_fails_alone(slice_: Slice, message: str) -> None:
    executor = engine.load("tiny:seed=1,context=64")
    bind(executor, 4)
    results = executor.step([slice_, Slice([65], 0, [0], 1)])
    assert message in failure(results[0])
    assert np.isfinite(rows(results[1])).all()


def test_a_pool_that_does_not_fit_is_refused() -> None:
    executor = engine.load("tiny:seed=1")
    size = executor.info.layout.page_bytes
    with pytest.raises(EngineError, match="before bind"):
        executor.step([Slice([1], 0, [0], 1)])
    with pytest.raises(EngineError, match="do not fit"):
        executor.bind(bytearray(size * 3), 4, size)
    with pytest.raises(EngineError, match="smaller than the layout"):
        executor.bind(bytearray(size * 3), 3, size - 4)
    with pytest.raises(EngineError, match="read-only"):
        executor.bind(memoryview(bytes(size * 3)), 3, size)


def test_importing_the_engine_and_a_scripted_model_need_no_torch() -> None:
    code = "import sys, engine, engine.generate; engine.load('script:'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": "."}).returncode == 0
