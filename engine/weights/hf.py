"""A Hugging Face model directory as a model: `config.json` and safetensors, under the names of GGUF files.

Gemma's norms get the 1 added that their published weights leave out. A tied head is the embedding table,
whatever else lies in the files. Knows nothing of tokenizers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.errors import WeightError
from engine.weights.hf_config import HfConfig, read_config
from engine.weights.known_digests import file_stamp, last_change_s
from engine.weights.safetensors import StoredTensor, as_floats, content_digest, numbers, open_tensors
from engine.weights.source import Floats, ModelSource

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_PARTS = {
    **_PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(.+)\.(weight|bias)")
_COMPUTED = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")


class HfWeights:
    """Implements `engine.weights.source.WeightSource` over mapped files."""

    def __init__(self, directory: Path, config: HfConfig) -> None:
        parts = _GEMMA_PARTS if config.architecture == "gemma3" else _PARTS
        self._one_more = config.architecture == "gemma3"
        stored = open_tensors(directory)
        self._tensors: dict[str, StoredTensor] = {}
        self._made = dict(config.divisors)
        for name, tensor in stored.items():
            ours = _our_name(name, parts)
            if ours is None:
                if _COMPUTED.fullmatch(name):
                    continue
                raise WeightError(f"{tensor.file}: the architecture has no place for tensor {name!r}")
            if ours == "output.weight" and config.tied:
                continue
            self._tensors[ours] = tensor
        if not config.tied and "output.weight" not in self._tensors:
            raise WeightError(f"{directory}: no tensor 'lm_head.weight', and tie_word_embeddings is false")
        self._extra = [
            json.dumps(sorted(config.metadata.items())).encode(),
            *(v.tobytes() for v in self._made.values()),
        ]
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: tensor.shape for name, tensor in self._tensors.items()},
            **{name: values.shape for name, values in self._made.items()},
        }

    def load(self, name: str) -> Floats:
        if name in self._made:
            return self._made[name]
        tensor = self._tensor(name)
        return self._finished(name, as_floats(numbers(tensor, name)), tensor)

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        return as_floats(numbers(self._tensor(name), name)[np.asarray(rows, dtype=np.int64)])

    def check(self, name: str) -> None:
        tensor = self._tensor(name)
        stored = numbers(tensor, name)
        for start in range(0, len(stored), 4096):
            self._finished(name, as_floats(stored[start : start + 4096]), tensor)

    def digest(self) -> bytes:
        return content_digest(self._tensors, self._extra)

    def stamp(self) -> bytes | None:
        files = {tensor.file: tensor.status for tensor in self._tensors.values()}
        stamps = [file_stamp(file, status) for file, status in sorted(files.items())]
        if None in stamps:
            return None
        assigned = json.dumps([(name, str(tensor.file)) for name, tensor in sorted(self._tensors.items())])
        whole = blake2b(digest_size=16)
        for part in (*stamps, assigned.encode(), *self._extra):
            assert part is not None
            whole.update(len(part).to_bytes(8, "little") + part)
        return whole.digest()

    def changed_s(self) -> float:
        return max(last_change_s(tensor.status) for tensor in self._tensors.values())

    def _finished(self, name: str, values: Floats, tensor: StoredTensor) -> Floats:
        if not np.isfinite(values).all():
            raise WeightError(
                f"{tensor.file}: tensor {name!r} ({tensor.dtype}) holds values that are not finite"
            )
        return values + np.float32(1) if self._one_more and name.endswith("norm.weight") else values

    def _tensor(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise WeightError(f"the files have no tensor {name!r}")
        return tensor


def _our_name(name: str, parts: Mapping[str, str]) -> str | None:
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    part = parts.get(match[2]) if match else None
    return None if match is None or part is None else f"blk.{int(match[1])}.{part}.{match[3]}"


def open_directory(directory: Path) -> ModelSource:
    """Raises EngineError or WeightError, naming the file and the key or tensor."""
    config = read_config(directory / "config.json")
    return ModelSource(
        name=directory.name,
        architecture=config.architecture,
        metadata=config.metadata,
        weights=HfWeights(directory, config),
    )
