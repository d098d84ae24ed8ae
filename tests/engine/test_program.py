"""A program that does not fit is refused when it is built, naming operation and tensor."""

import re

import pytest

from engine import EngineError, ProgramError
from engine.models import build
from engine.program import Attend, Builder, Embed, Tensor, WriteKv
from engine.rope import Turns
from engine.tiny import TinySpec, tiny_model
from engine.weights.source import ModelSource


class Shapes:
    """Weights of which only the shapes matter."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes


def changed(
    shapes: dict[str, tuple[int, ...] | None] | None = None, metadata: dict[str, object] | None = None
) -> ModelSource:
    """The tiny model with other shapes (None: gone) or other hyper-parameters."""
    tiny = tiny_model(TinySpec())
    all_shapes = {**tiny.weights.shapes, **(shapes or {})}
    kept = {name: shape for name, shape in all_shapes.items() if shape is not None}
    keys = {f"llama.{key.replace('__', '.')}": value for key, value in (metadata or {}).items()}
    merged = {k: v for k, v in {**tiny.metadata, **keys}.items() if v is not None}
    return ModelSource("changed", tiny.architecture, merged, Shapes(kept))  # type: ignore[arg-type]


def test_a_good_model_builds() -> None:
    program, _ = build(changed())
    assert program.result == Tensor("output", "logit_rows", 272)
    assert [cache.layer for cache in program.caches] == [0, 1]
    assert isinstance(program.operations[0], Embed)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"blk.1.attn_k.weight": None}, "layers.1.k: the file has no tensor 'blk.1.attn_k.weight'"),
        (
            {"blk.0.ffn_down.weight": (32, 63)},
            "layers.0.down: tensor 'blk.0.ffn_down.weight' has shape (32, 63) where (32, 64) is needed",
        ),
        ({"blk.0.attn_norm.weight": (1, 32)}, "layers.0.attn_norm: tensor 'blk.0.attn_norm.weight'"),
        ({"token_embd.weight": (272, 31)}, "embed: tensor 'token_embd.weight' has shape (272, 31)"),
        ({"token_embd.weight": None}, "tensor 'token_embd.weight'"),
        ({"output.weight": (271, 32)}, "output: tensor 'output.weight' has shape (271, 32)"),
        ({"rope_freqs.weight": (5,)}, "layers.0.rope_q: tensor 'rope_freqs.weight' has shape (5,)"),
    ],
)
def test_a_wrong_tensor_is_named(shapes: dict[str, tuple[int, ...] | None], message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        build(changed(shapes))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"block_count": "2"}, "llama.block_count is '2'"),
        ({"attention__head_count": 5}, "does"),
        ({"attention__head_count_kv": 3}, "attn_k.weight"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "finite number above 0"),
        ({"rope__freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
        ({"rope__scaling__type": "spiral"}, "llama.rope.scaling.type is 'spiral', which is not known"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count is 4"),
        ({"expert_count": 8}, "llama.expert_count is 8"),
    ],
)
def test_a_bad_hyperparameter_is_named(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message if message != "does" else "attn_q.weight"):
        build(changed(metadata=metadata))


def test_an_unknown_architecture_is_refused() -> None:
    tiny = tiny_model(TinySpec())
    with pytest.raises(EngineError, match="'mamba' is not known"):
        build(ModelSource("m", "mamba", tiny.metadata, tiny.weights))


def test_operations_check_their_operands() -> None:
    b = Builder({"t": (10, 8), "w": (12, 8), "n": (8,)})
    x = b.embed("embed", "t", width=8, vocab=10)
    y = b.linear("wide", x, "w", width=12)
    with pytest.raises(ProgramError, match=r"sum: embed f32\[rows, 8\] and wide"):
        b.add("sum", x, y)
    with pytest.raises(ProgramError, match="two operations are named wide"):
        b.linear("wide", x, "w", width=12)
    with pytest.raises(ProgramError, match=r"turn: wide .* is no whole number of 5 heads"):
        b.rope("turn", y, heads=5, style="halves", turns=Turns(8, 1e4))
    with pytest.raises(ProgramError, match=r"turn: .* no pairs"):
        b.rope("turn", y, heads=4, style="halves", turns=Turns(8, 1e4))
    with pytest.raises(ProgramError, match=r"kv: keys embed .* and values wide"):
        b.write_kv("kv", x, y, layer=0, heads=2)
    cache = b.write_kv("kv", x, x, layer=0, heads=2)
    with pytest.raises(ProgramError, match="layer 0 writes its pages twice"):
        b.write_kv("again", x, x, layer=0, heads=2)
    with pytest.raises(ProgramError, match=r"see: .* does not fit 2 key heads of 4"):
        b.attend("see", y, cache, q_heads=2, scale=1.0)
    with pytest.raises(ProgramError, match="no logits"):
        b.program(x, rope="", hidden_size=8, vocab_size=10)


def test_pages_hold_what_the_attention_of_their_layer_reads() -> None:
    program, _ = build(changed())
    writes = [op.cache for op in program.operations if isinstance(op, WriteKv)]
    reads = [op.cache for op in program.operations if isinstance(op, Attend)]
    assert writes == reads == list(program.caches)
