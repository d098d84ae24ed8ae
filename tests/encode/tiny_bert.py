"""A BERT with random weights and a vocabulary of single characters, in a directory as real ones have it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
HIDDEN, LAYERS, HEADS, WIDE, LONGEST = 16, 2, 4, 32, 40


def tiny_bert(directory: Path, **config: Any) -> Path:
    """Writes the model; `config` replaces entries of `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {
        token: index for index, token in enumerate([*SPECIAL, *LETTERS, *(f"##{c}" for c in LETTERS)])
    }
    settings = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": WIDE,
        "max_position_embeddings": LONGEST,
        "layer_norm_eps": 1e-12,
        "vocab_size": len(vocabulary),
    }
    (directory / "config.json").write_text(json.dumps({**settings, **config}))
    _write_tokenizer(directory / "tokenizer.json", vocabulary)
    write_safetensors(directory / "model.safetensors", _weights(len(vocabulary)))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": "" if i == 0 else f"{i}_{kind}"}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return directory


def _write_tokenizer(path: Path, vocabulary: dict[str, int]) -> None:
    fast = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast.add_special_tokens(SPECIAL)
    # As real files have it: asks for cutting and padding, which nobody here wants.
    fast.enable_truncation(8)
    fast.enable_padding(length=8)
    fast.save(str(path))


def _weights(vocabulary: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    draw = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return draw.normal(0, 0.3, shape).astype(np.float32)

    out = {
        "embeddings.word_embeddings.weight": normal(vocabulary, HIDDEN),
        "embeddings.position_embeddings.weight": normal(LONGEST, HIDDEN),
        "embeddings.token_type_embeddings.weight": normal(2, HIDDEN),
        "embeddings.LayerNorm.weight": 1 + normal(HIDDEN),
        "embeddings.LayerNorm.bias": normal(HIDDEN),
    }
    for index in range(LAYERS):
        at = f"encoder.layer.{index}."
        for name, rows, columns in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", WIDE, HIDDEN),
            ("output.dense", HIDDEN, WIDE),
        ):
            out[f"{at}{name}.weight"], out[f"{at}{name}.bias"] = normal(rows, columns), normal(rows)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            out[f"{at}{name}.weight"], out[f"{at}{name}.bias"] = 1 + normal(HIDDEN), normal(HIDDEN)
    return out


def write_safetensors(path: Path, arrays: dict[str, Any]) -> None:
    """The plainest writer of the format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
