"""BERT as a sentence encoder, in float32 with numpy.

Sequences of a batch lie one after another without padding: the matrix products see all
rows at once, attention each sequence by itself. Reads a directory of the layout that
sentence-transformers has: `config.json`, `model.safetensors`, `modules.json`,
`1_Pooling/config.json`. It knows token ids, no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from encode.safetensors import SafetensorsError, read

Rows = NDArray[np.float32]


class EncoderError(Exception):
    """The model cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`weight` is [in, out]."""

    weight: Rows
    bias: Rows

    def __call__(self, rows: Rows) -> Rows:
        out: Rows = rows @ self.weight
        out += self.bias
        return out


@dataclass(frozen=True, slots=True)
class Norm:
    gain: Rows
    bias: Rows
    epsilon: float

    def __call__(self, rows: Rows) -> Rows:
        centred = rows - rows.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + np.float32(self.epsilon))
        out: Rows = centred / scale * self.gain + self.bias
        return out


@dataclass(frozen=True, slots=True)
class Layer:
    query: Linear
    key: Linear
    value: Linear
    mixed: Linear
    attention_norm: Norm
    wide: Linear
    narrow: Linear
    norm: Norm


class Bert:
    """`dimensions` is the length of a vector, `context_length` the longest sequence in tokens."""

    def __init__(self, directory: Path) -> None:
        """Raises EncoderError."""
        try:
            config = _json(directory / "config.json")
            tensors = read(directory / "model.safetensors")
            self._build(config, tensors)
            self._read_modules(directory)
        except (OSError, SafetensorsError, KeyError, ValueError) as error:
            raise EncoderError(f"{directory}: {error}") from error

    def embed(self, batch: Sequence[Sequence[int]]) -> Rows:
        """One vector for each sequence of ids. [len(batch), dimensions]"""
        lengths = [len(ids) for ids in batch]
        ends = np.cumsum(lengths)
        spans = list(zip(ends - lengths, ends, strict=True))
        ids = np.concatenate([np.asarray(ids, np.int64) for ids in batch])
        places = np.concatenate([np.arange(length) for length in lengths])
        rows: Rows = self._embedding_norm(self._words[ids] + self._places[places] + self._type)
        for layer in self._layers:
            mixed = self._attend(layer, rows, spans)
            rows = layer.attention_norm(rows + layer.mixed(mixed))
            rows = layer.norm(rows + layer.narrow(_gelu(layer.wide(rows))))
        return self._pool(rows, spans)

    def _attend(self, layer: Layer, rows: Rows, spans: Sequence[tuple[int, int]]) -> Rows:
        heads, dim = self._heads, self.dimensions // self._heads
        # [heads, rows, dim]
        query, key, value = (
            part(rows).reshape(-1, heads, dim).transpose(1, 0, 2)
            for part in (layer.query, layer.key, layer.value)
        )
        out = np.empty((len(rows), heads, dim), np.float32)
        scale = np.float32(dim**-0.5)
        for first, end in spans:
            scores = query[:, first:end] @ key[:, first:end].transpose(0, 2, 1) * scale
            scores -= scores.max(axis=2, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=2, keepdims=True)
            out[first:end] = (scores @ value[:, first:end]).transpose(1, 0, 2)
        return out.reshape(len(rows), heads * dim)

    def _pool(self, rows: Rows, spans: Sequence[tuple[int, int]]) -> Rows:
        if self._mean:
            pooled = np.stack([rows[first:end].mean(axis=0) for first, end in spans])
        else:
            pooled = np.stack([rows[first] for first, _ in spans])
        return normalised(pooled) if self._normalise else pooled

    def _build(self, config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> None:
        if config.get("model_type") != "bert" or config.get("hidden_act", "gelu") != "gelu":
            raise ValueError("only BERT with gelu is known here")
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
        epsilon = float(config.get("layer_norm_eps", 1e-12))

        def tensor(name: str) -> Rows:
            return np.ascontiguousarray(tensors[prefix + name], np.float32)

        def linear(name: str) -> Linear:
            return Linear(np.ascontiguousarray(tensor(f"{name}.weight").T), tensor(f"{name}.bias"))

        def norm(name: str) -> Norm:
            return Norm(tensor(f"{name}.weight"), tensor(f"{name}.bias"), epsilon)

        self._words = tensor("embeddings.word_embeddings.weight")
        self._places = tensor("embeddings.position_embeddings.weight")
        self._type = tensor("embeddings.token_type_embeddings.weight")[0]
        self._embedding_norm = norm("embeddings.LayerNorm")
        self._heads = int(config["num_attention_heads"])
        self.vocab_size, self.dimensions = self._words.shape
        self.context_length = len(self._places)
        self._layers = [
            Layer(
                linear(f"encoder.layer.{index}.attention.self.query"),
                linear(f"encoder.layer.{index}.attention.self.key"),
                linear(f"encoder.layer.{index}.attention.self.value"),
                linear(f"encoder.layer.{index}.attention.output.dense"),
                norm(f"encoder.layer.{index}.attention.output.LayerNorm"),
                linear(f"encoder.layer.{index}.intermediate.dense"),
                linear(f"encoder.layer.{index}.output.dense"),
                norm(f"encoder.layer.{index}.output.LayerNorm"),
            )
            for index in range(int(config["num_hidden_layers"]))
        ]

    def _read_modules(self, directory: Path) -> None:
        """How rows become one vector; the mean, not normalised, where nothing says so."""
        self._mean, self._normalise = True, False
        modules = directory / "modules.json"
        if not modules.exists():
            return
        for module in json.loads(modules.read_text(encoding="utf-8")):
            kind = str(module["type"]).rpartition(".")[2]
            if kind == "Normalize":
                self._normalise = True
            elif kind == "Pooling":
                pooling = _json(directory / module["path"] / "config.json")
                chosen = {
                    name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True
                }
                if not chosen <= {"pooling_mode_mean_tokens", "pooling_mode_cls_token"} or len(chosen) != 1:
                    raise ValueError(f"pooling by {', '.join(sorted(chosen)) or 'nothing'} is not known here")
                self._mean = "pooling_mode_mean_tokens" in chosen
            elif kind != "Transformer":
                raise ValueError(f"the module {kind} is not known here")


def normalised(vectors: Rows) -> Rows:
    """Each of length 1."""
    out: Rows = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return out


def _gelu(rows: Rows) -> Rows:
    """x (1 + erf(x / sqrt 2)) / 2.

    erf by Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: off by at most 1.5e-7.
    """
    x = rows * np.float32(2**-0.5)
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    series = t * (
        np.float32(0.254829592)
        + t
        * (
            np.float32(-0.284496736)
            + t * (np.float32(1.421413741) + t * (np.float32(-1.453152027) + t * np.float32(1.061405429)))
        )
    )
    erf = np.copysign(1 - series * np.exp(-x * x), x)
    out: Rows = rows * (1 + erf) * np.float32(0.5)
    return out


def _json(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is no object")
    return document
