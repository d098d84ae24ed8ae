"""A Hugging Face `config.json` as hyper-parameters under the names that GGUF files use.

Old and new spellings: `rope_theta` beside `rope_scaling` with `type` or `rope_type`, or `rope_parameters`.
What would change a result and is not known is refused by name. Knows nothing of weights.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.rope import llama3_divisors, longrope_magnitude, yarn_magnitude
from engine.weights.source import Floats

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class HfConfig:
    architecture: str
    metadata: Mapping[str, Any]
    tied: bool
    divisors: Mapping[str, Floats] = field(default_factory=dict)
    """Tensors that the file would carry if it were a GGUF."""


class _Config:
    """Typed access; errors name the file and the key."""

    def __init__(self, file: Path, values: Mapping[str, Any], place: str = "") -> None:
        self._file, self.values, self._place = file, values, place

    def fail(self, key: str, what: str) -> EngineError:
        return EngineError(f"{self._file}: {self._place}{key} is {self.values.get(key)!r}: {what}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.fail(key, "a finite number above 0 is needed")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.fail(key, "a whole number from 1 on is needed")
        return value

    def numbers(self, key: str, length: int) -> Floats:
        value = self.values.get(key)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(type(x) in (int, float) for x in value)
        ):
            raise self.fail(key, f"{length} numbers are needed")
        found = np.array(value, np.float32)
        if not (np.isfinite(found) & (found > 0)).all():
            raise self.fail(key, "finite numbers above 0 are needed")
        return found

    def refuse(self, key: str, *allowed: Any) -> None:
        if self.values.get(key) not in (None, *allowed):
            raise self.fail(key, "not supported")

    def part(self, key: str) -> "_Config":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object is needed")
        return _Config(self._file, value, f"{self._place}{key}.")


def read_config(file: Path) -> HfConfig:
    """Raises EngineError naming the file and the key."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise EngineError(f"{file}: larger than {_MAX_BYTES} bytes")
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise EngineError(f"{file} is missing") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{file}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise EngineError(f"{file}: no JSON object")
    c = _Config(file, values)
    kind = values.get("model_type")
    architecture = ARCHITECTURES.get(str(kind))
    if architecture is None:
        raise c.fail(
            "model_type", f"the architecture is not known (known: {', '.join(sorted(ARCHITECTURES))})"
        )
    c.refuse("quantization_config")
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    dim = c.count("head_dim", 256 if architecture == "gemma3" else max(1, hidden // heads))
    found: dict[str, Any] = {
        "context_length": c.count("max_position_embeddings"),
        "embedding_length": hidden,
        "block_count": c.count("num_hidden_layers"),
        "feed_forward_length": c.count("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": c.count("num_key_value_heads", heads),
        "attention.key_length": dim,
        "attention.layer_norm_rms_epsilon": c.number("rms_norm_eps", 1e-6),
        "rope.style": "halves",
    }
    activation = values.get("hidden_activation") or values.get("hidden_act")
    gelu = architecture == "gemma3"
    if activation not in (("gelu_pytorch_tanh",) if gelu else ("silu", None)):
        raise EngineError(f"{file}: hidden_act is {activation!r}: not what {kind} has")
    if gelu:
        _gemma(c, found)
    elif values.get("use_sliding_window", kind == "mistral") and values.get("sliding_window") is not None:
        raise c.fail("sliding_window", "not supported for this architecture")
    divisors = _rope(c, found, dim, nested=gelu)
    metadata = {f"{architecture}.{key}": value for key, value in found.items()}
    tied = values.get("tie_word_embeddings", gelu)
    if not isinstance(tied, bool):
        raise c.fail("tie_word_embeddings", "a truth value is needed")
    return HfConfig(architecture, metadata, tied, divisors)


def _gemma(c: _Config, found: dict[str, Any]) -> None:
    c.refuse("use_bidirectional_attention", False)
    found["attention.sliding_window"] = c.count("sliding_window", 4096)
    found["attention.scale"] = c.number("query_pre_attn_scalar", 256.0) ** -0.5
    found["attention.sliding_window_pattern"] = _pattern(c, found["block_count"])
    for key, name in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if c.values.get(key) is not None:
            found[name] = c.number(key)


def _pattern(c: _Config, layers: int) -> int:
    """Every how many layers one sees everything."""
    kinds = c.values.get("layer_types")
    if kinds is None:
        return c.count("sliding_window_pattern", c.values.get("_sliding_window_pattern") or 6)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise c.fail("layer_types", f"{layers} kinds are needed")
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
    wanted = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    if kinds != wanted:
        raise c.fail("layer_types", "only every n-th layer may see everything")
    return period


def _rope(c: _Config, found: dict[str, Any], dim: int, *, nested: bool) -> dict[str, Floats]:
    rope = c
    if isinstance(c.values.get("rope_parameters"), dict):
        rope = c.part("rope_parameters")
        if nested and "full_attention" in rope.values:
            near = rope.part("sliding_attention")
            _refuse_scaling(near)
            found["rope.freq_base_swa"] = near.number("rope_theta")
            rope = rope.part("full_attention")
        found["rope.freq_base"] = rope.number("rope_theta", 1e6 if nested else 10000.0)
    else:
        found["rope.freq_base"] = c.number("rope_theta", 1e6 if nested else 10000.0)
        if nested:
            found["rope.freq_base_swa"] = c.number("rope_local_base_freq", 10000.0)
        if c.values.get("rope_scaling") is None:
            return {}
        rope = c.part("rope_scaling")
    rope.refuse("partial_rotary_factor", 1, 1.0)
    c.refuse("partial_rotary_factor", 1, 1.0)
    kind = _kind(rope)
    if kind == "default":
        return {}
    base, context = found["rope.freq_base"], found["context_length"]
    original = rope.count(
        "original_max_position_embeddings", c.values.get("original_max_position_embeddings") or context
    )
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise rope.fail("high_freq_factor", "it must be above low_freq_factor")
        factor, old = rope.number("factor"), rope.count("original_max_position_embeddings")
        return {
            "rope_freqs.weight": llama3_divisors(base, dim, factor=factor, low=low, high=high, original=old)
        }
    found["rope.scaling.type"] = kind
    found["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        factor = rope.number("factor", context / original)
        found["rope.scaling.attn_factor"] = rope.number(
            "attention_factor", longrope_magnitude(factor, original)
        )
        return {f"rope_factors_{x}.weight": rope.numbers(f"{x}_factor", dim // 2) for x in ("long", "short")}
    found["rope.scaling.factor"] = rope.number("factor")
    if kind == "yarn":
        _yarn(rope, found)
    return {}


def _yarn(rope: _Config, found: dict[str, Any]) -> None:
    factor = found["rope.scaling.factor"]
    both = rope.values.get("mscale") and rope.values.get("mscale_all_dim")
    magnitude = yarn_magnitude(factor)
    if both:
        magnitude = yarn_magnitude(factor, rope.number("mscale")) / yarn_magnitude(
            factor, rope.number("mscale_all_dim")
        )
    found["rope.scaling.attn_factor"] = rope.number("attention_factor", magnitude)
    found["rope.scaling.yarn_beta_fast"] = rope.number("beta_fast", 32.0)
    found["rope.scaling.yarn_beta_slow"] = rope.number("beta_slow", 1.0)
    found["rope.scaling.yarn_truncate"] = bool(rope.values.get("truncate", True))


def _kind(rope: _Config) -> str:
    """The old key `type` and the new one `rope_type` may both stand there, if they agree."""
    kinds = {rope.values[key] for key in ("rope_type", "type") if rope.values.get(key) is not None}
    if len(kinds) > 1:
        raise rope.fail("rope_type", f"type is {rope.values.get('type')!r}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3", "longrope"):
        raise rope.fail("rope_type" if "rope_type" in rope.values else "type", "this scaling is not known")
    return str(kind)


def _refuse_scaling(rope: _Config) -> None:
    if _kind(rope) != "default":
        raise rope.fail("rope_type", "layers with a window are not scaled")
