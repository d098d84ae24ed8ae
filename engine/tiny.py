"""A tiny model with random weights, for tests: the whole mesh runs on it in a second.

`tiny:seed=1[,layers=2][,context=4096]`. It is a `llama` like any other and runs on the same executor. Its
vocabulary is that of the ByteTokenizer: 256 bytes, 5 control tokens, and padding that is never chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from engine.errors import EngineError, WeightError
from engine.weights.source import Floats, ModelSource
from text.byte_tokenizer import ASSISTANT_ID, TINY_CONTEXT_LENGTH, VOCAB_SIZE

USED_VOCAB = ASSISTANT_ID + 1
HIDDEN, INNER, HEADS, KV_HEADS = 32, 64, 4, 2


@dataclass(frozen=True, slots=True)
class TinySpec:
    seed: int = 0
    layers: int = 2
    context: int = TINY_CONTEXT_LENGTH

    @classmethod
    def parse(cls, source: str) -> "TinySpec":
        """From `tiny:key=value,…`. Raises EngineError naming the part at fault."""
        limits = {"seed": 2**63 - 1, "layers": 64, "context": 1 << 20}
        values: dict[str, int] = {}
        for part in filter(None, source.removeprefix("tiny:").split(",")):
            key, _, text = part.partition("=")
            if key not in limits or not (text.isascii() and text.isdigit()) or int(text) > limits[key]:
                raise EngineError(f"{source!r}: {part!r} is not understood (seed, layers, context = number)")
            values[key] = int(text)
        if values.get("layers", 1) < 1 or values.get("context", 1) < 1:
            raise EngineError(f"{source!r}: layers and context must be at least 1")
        return cls(**values)

    def canonical(self) -> str:
        return f"tiny:seed={self.seed},layers={self.layers},context={self.context}"


class TinyWeights:
    """Implements `engine.weights.source.WeightSource`."""

    def __init__(self, spec: TinySpec) -> None:
        self._digest = blake2b(b"1 " + spec.canonical().encode(), digest_size=16).digest()
        self._tensors: dict[str, Floats] = {}
        bits: Any = np.random.Philox(key=spec.seed)
        random = np.random.Generator(bits)
        for name, shape in _shapes(spec.layers).items():
            values: Floats = random.standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                values = np.float32(1) + values / np.float32(8)
            elif name != "token_embd.weight":
                # Large enough that attention and context matter to what comes out.
                values *= np.float32(1.5 / np.sqrt(shape[-1]))
            self._tensors[name] = values
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(values.shape) for name, values in self._tensors.items()
        }

    def load(self, name: str) -> Floats:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightError(f"the tiny model has no tensor {name!r}") from None

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        return self.load(name)[np.asarray(rows, dtype=np.int64)]

    def check(self, name: str) -> None:
        self.load(name)

    def digest(self) -> bytes:
        return self._digest


def tiny_model(spec: TinySpec) -> ModelSource:
    metadata = {
        "llama.block_count": spec.layers,
        "llama.context_length": spec.context,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }
    return ModelSource(
        name="tiny",
        architecture="llama",
        metadata=metadata,
        weights=TinyWeights(spec),
        padding_ids=(USED_VOCAB, VOCAB_SIZE),
    )


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB_SIZE, HIDDEN)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * dim, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * dim, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * dim, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * dim),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    return shapes | {"output_norm.weight": (HIDDEN,), "output.weight": (VOCAB_SIZE, HIDDEN)}
