"""Safetensors directories: what is tied, missing, stray or hostile; an error names the file and the tensor."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import engine
from engine import EngineError, WeightError
from engine.executor import Logits
from engine.weights.safetensors import INDEX, MAX_HEADER_BYTES, SINGLE
from tests.engine.pools import bind, run

Arrays = dict[str, NDArray[Any]]
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def tensors() -> Arrays:
    numbers = np.random.default_rng(1)
    layer = "model.layers.0."
    shapes = {
        EMBED: (40, 32),
        HEAD: (40, 32),
        "model.norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,),
        f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (32, 32),
        f"{layer}self_attn.q_proj.bias": (32,),
        f"{layer}self_attn.k_proj.weight": (16, 32),
        f"{layer}self_attn.k_proj.bias": (16,),
        f"{layer}self_attn.v_proj.weight": (16, 32),
        f"{layer}self_attn.v_proj.bias": (16,),
        f"{layer}self_attn.o_proj.weight": (32, 32),
        f"{layer}mlp.gate_proj.weight": (64, 32),
        f"{layer}mlp.up_proj.weight": (64, 32),
        f"{layer}mlp.down_proj.weight": (32, 64),
    }
    return {name: numbers.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def header_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    return header


def write_file(path: Path, arrays: Mapping[str, NDArray[Any]], header: object = None) -> None:
    head = header if isinstance(header, bytes) else json.dumps(header or header_of(arrays)).encode()
    body = b"".join(values.astype(np.float32).tobytes() for values in arrays.values())
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)


def write(directory: Path, arrays: Arrays, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    write_file(directory / SINGLE, arrays)
    return directory


def write_shards(directory: Path, arrays: Arrays) -> dict[str, str]:
    """Two shards and their index."""
    write(directory, arrays)
    (directory / SINGLE).unlink()
    names = list(arrays)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        write_file(directory / file, {name: arrays[name] for name in chosen})
    assigned = {name: file for file, chosen in parts.items() for name in chosen}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": assigned}))
    return assigned


def logits(directory: Path) -> Logits:
    executor = engine.load(str(directory), kv_dtype="f32")
    bind(executor, 4)
    return run(executor, [1, 5, 9, 30, 2], range(4), [5])


def refused(directory: Path, *said: str) -> None:
    with pytest.raises(EngineError) as caught:
        engine.load(str(directory))
    for text in said:
        assert text in str(caught.value)


@pytest.mark.parametrize("head", ["equal", "different", "absent"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_flag_decides_whether_the_head_is_tied(tmp_path: Path, tied: bool, head: str) -> None:
    arrays = tensors()
    other = arrays.pop(HEAD)
    plain = logits(write(tmp_path / "tied", arrays, tie_word_embeddings=True))
    if head != "absent":
        arrays[HEAD] = arrays[EMBED] if head == "equal" else other
    directory = write(tmp_path / "m", arrays, tie_word_embeddings=tied)
    if not tied and head == "absent":
        refused(directory, HEAD)
    else:
        same = logits(directory).tobytes() == plain.tobytes()
        assert same == (tied or head == "equal")


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    one, many = write(tmp_path / "one", tensors()), tmp_path / "many"
    write_shards(many, tensors())
    assert logits(one).tobytes() == logits(many).tobytes()
    digests = {engine.load(str(directory)).info.weights_digest for directory in (one, many)}
    assert len(digests) == 1


def test_a_missing_shard_or_tensor_is_named(tmp_path: Path) -> None:
    assigned = write_shards(tmp_path / "m", tensors())
    shard = tmp_path / "m" / assigned[HEAD]
    names = [name for name, file in assigned.items() if file == assigned[HEAD] and name != HEAD]
    write_file(shard, {name: tensors()[name] for name in names})
    refused(tmp_path / "m", str(shard), HEAD)
    shard.unlink()
    refused(tmp_path / "m", str(shard), "missing")
    arrays = tensors()
    values = arrays.pop("model.layers.0.mlp.up_proj.weight")
    refused(write(tmp_path / "n", arrays), "blk.0.ffn_up.weight")
    refused(
        write(tmp_path / "o", {**arrays, "model.layers.0.mlp.up.weight": values}),
        "model.layers.0.mlp.up.weight",
    )
    bias = {**tensors(), "model.layers.0.mlp.up_proj.bias": np.zeros(64, np.float32)}
    logits(write(tmp_path / "p", bias))
    refused(
        write(tmp_path / "q", {**tensors(), "model.layers.1.mlp.up_proj.bias": values[0]}),
        "blk.1.ffn_up.bias",
    )
    refused(write(tmp_path / "r", {**tensors(), "x": values}), "'x'")


def test_the_index_decides_and_strays_are_ignored(tmp_path: Path) -> None:
    wanted = logits(write(tmp_path / "one", tensors()))
    assigned = write_shards(tmp_path / "m", tensors())
    wrong = {name: values + 1 for name, values in tensors().items()}
    write_file(tmp_path / "m" / "0-merged.safetensors", wrong)
    write_file(tmp_path / "m" / "z.safetensors", wrong)
    other = "b.safetensors" if assigned[HEAD] == "a.safetensors" else "a.safetensors"
    mine = {name: tensors()[name] for name, file in assigned.items() if file == other}
    write_file(tmp_path / "m" / other, {HEAD: wrong[HEAD], **mine})
    assert logits(tmp_path / "m").tobytes() == wanted.tobytes()


def test_without_an_index_a_name_may_stand_in_one_file_only(tmp_path: Path) -> None:
    write_shards(tmp_path / "m", tensors())
    (tmp_path / "m" / INDEX).unlink()
    logits(tmp_path / "m")
    write_file(tmp_path / "m" / "c.safetensors", {HEAD: tensors()[HEAD]})
    refused(tmp_path / "m", "c.safetensors", HEAD, "no index")


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "a.bin", 7])
def test_an_index_may_not_leave_its_directory(tmp_path: Path, shard: object) -> None:
    assigned: dict[str, object] = dict(write_shards(tmp_path / "m", tensors()))
    assigned[HEAD] = shard
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": assigned}))
    refused(tmp_path / "m", INDEX, HEAD)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"data_offsets": [0, 1 << 40]}, "leave the file"),
        ({"data_offsets": [8, 4]}, "leave the file"),
        ({"data_offsets": [0, 4]}, "4 bytes for shape"),
        ({"data_offsets": [-4, 4]}, "data_offsets"),
        ({"data_offsets": "all"}, "data_offsets"),
        ({"shape": [1 << 60, 1 << 60]}, "shape"),
        ({"shape": [40, -32]}, "shape"),
        ({"shape": [40, 32.0]}, "shape"),
        ({"shape": [True, 32]}, "shape"),
        ({"dtype": "F4"}, "dtype 'F4'"),
        ({"dtype": "I32"}, "cannot be read"),
    ],
    ids=str,
)
def test_a_hostile_header_is_refused(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    directory = write(tmp_path / "m", tensors())
    header = header_of(tensors())
    header[EMBED] |= entry
    write_file(directory / SINGLE, tensors(), header)
    refused(directory, said, EMBED if said != "cannot be read" else "token_embd")


def test_bytes_that_overlap_and_names_that_stand_twice(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", tensors())
    header = header_of(tensors())
    header[HEAD]["data_offsets"] = header[EMBED]["data_offsets"]
    write_file(directory / SINGLE, tensors(), header)
    refused(directory, "overlap", HEAD)
    text = json.dumps(header_of(tensors()))
    write_file(directory / SINGLE, tensors(), (text[:-1] + f', "{HEAD}": {{}}}}').encode())
    refused(directory, SINGLE, "twice")


@pytest.mark.parametrize("head", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_header_is_refused(tmp_path: Path, head: bytes) -> None:
    directory = write(tmp_path / "m", tensors())
    (directory / SINGLE).write_bytes(struct.pack("<Q", len(head)) + head)
    refused(directory, SINGLE)
    for length in (MAX_HEADER_BYTES + 1, 2**63, len(head) + 1):
        (directory / SINGLE).write_bytes(struct.pack("<Q", length) + head)
        refused(directory, SINGLE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight", EMBED])
def test_numbers_that_are_none_are_refused(tmp_path: Path, name: str, value: float) -> None:
    arrays = tensors()
    arrays[name].reshape(-1)[-1] = value
    with pytest.raises(WeightError, match="not finite"):
        engine.load(str(write(tmp_path / "m", arrays)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt9"}, "gpt9"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "long_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
        ({"num_attention_heads": "2"}, "num_attention_heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
    ids=str,
)
def test_a_configuration_that_would_change_the_result_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    refused(write(tmp_path / "m", tensors(), **changes), "config.json", said)
