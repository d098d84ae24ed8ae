"""Vectors: alone and in company, beside the same model written down in torch, and a real model's known ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encode.bert import Bert, EncoderError, _gelu
from encode.safetensors import SafetensorsError, read
from tests.encode.tiny_bert import LONGEST, tiny_bert

SEQUENCES = [[2, 3], [2, 5, 6, 3], [2, *range(4, 40), 3], [2, 7, 3]]

# What transformers 4.57 (torch, float32, mean of the last hidden state, normalised) says of
# all-MiniLM-L6-v2: the ids, the first six numbers and the sum. Largest difference of any number
# here and there: 1.1e-7 (2026-12-01).
KNOWN = [
    (
        "How do I reset my password?",
        9,
        [0.006903, -0.0630234, -0.072044, -0.0324961, -0.0427094, 0.0704294],
        -0.048388,
    ),
    ("The sky is blue.", 7, [0.0179195, 0.0135288, 0.0427967, 0.0167182, 0.0298238, 0.0050075], -0.122396),
    (
        "Příliš žluťoučký kůň úpěl ďábelské ódy 🫠",
        17,
        [-0.119082, 0.1090054, 0.0217624, -0.0038255, -0.0203089, -0.0454306],
        0.01443,
    ),
    ("x " * 200, 202, [0.0002538, -0.0322401, -0.0237199, -0.0421063, -0.0981175, -0.0791597], -2.734809),
    (
        "def f(x):\n    return x + 1",
        12,
        [-0.0478629, 0.0637935, -0.0108037, 0.0145869, -0.0306602, -0.0319298],
        -0.088345,
    ),
]


@pytest.fixture
def model(tmp_path: Path) -> Bert:
    return Bert(tiny_bert(tmp_path / "tiny"))


def test_company_changes_nothing_that_counts(model: Bert) -> None:
    together = model.embed(SEQUENCES)
    assert together.shape == (4, model.dimensions)
    assert np.linalg.norm(together, axis=1) == pytest.approx(np.ones(4), abs=1e-6)
    for sequence, vector in zip(SEQUENCES, together, strict=True):
        assert model.embed([sequence])[0] == pytest.approx(vector, abs=1e-6)


def test_gelu_is_that_of_the_error_function() -> None:
    x = np.linspace(-8, 8, 4001, dtype=np.float32)
    right = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.tolist()]
    assert _gelu(x) == pytest.approx(right, abs=1e-6)


@pytest.mark.slow
def test_the_same_model_in_torch_says_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    directory = tiny_bert(tmp_path / "tiny")
    tensors = {
        name: torch.tensor(np.array(array)) for name, array in read(directory / "model.safetensors").items()
    }

    def linear(name: str, rows: Any) -> Any:
        return functional.linear(rows, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(name: str, rows: Any) -> Any:
        return functional.layer_norm(rows, (16,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    for ids in SEQUENCES:
        rows = (
            tensors["embeddings.word_embeddings.weight"][ids]
            + tensors["embeddings.position_embeddings.weight"][: len(ids)]
            + tensors["embeddings.token_type_embeddings.weight"][0]
        )
        rows = norm("embeddings.LayerNorm", rows)
        for index in range(2):
            at = f"encoder.layer.{index}"
            query, key, value = (
                linear(f"{at}.attention.self.{part}", rows).reshape(1, len(ids), 4, 4).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
            mixed = linear(f"{at}.attention.output.dense", mixed.reshape(len(ids), 16))
            rows = norm(f"{at}.attention.output.LayerNorm", rows + mixed)
            wide = functional.gelu(linear(f"{at}.intermediate.dense", rows))
            rows = norm(f"{at}.output.LayerNorm", rows + linear(f"{at}.output.dense", wide))
        right = functional.normalize(rows.mean(0), dim=0)
        assert Bert(directory).embed([ids])[0] == pytest.approx(right.tolist(), abs=1e-5)


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_has_its_known_vectors(tmp_path: Path) -> None:
    from mesh.models import resolve
    from text import load_text_model

    path = Path(resolve("pkg:minilm", tmp_path).path)
    model, text = Bert(path), load_text_model(str(path))
    ids = [text.tokenizer.encode(known[0], add_special=True, parse_special=True) for known in KNOWN]
    vectors = model.embed(ids)
    for (_, count, first, total), tokens, vector in zip(KNOWN, ids, vectors, strict=True):
        assert len(tokens) == count
        assert vector[:6].tolist() == pytest.approx(first, abs=1e-5)
        assert float(vector.sum()) == pytest.approx(total, abs=1e-4)


def test_what_is_no_such_model_says_why(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="nowhere"):
        Bert(tmp_path / "nowhere")
    with pytest.raises(EncoderError, match="gelu"):
        Bert(tiny_bert(tmp_path / "relu", hidden_act="relu"))
    pooled = tiny_bert(tmp_path / "max")
    (pooled / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(EncoderError, match="pooling_mode_max_tokens"):
        Bert(pooled)
    for name, content in (("short", b"1234"), ("long", b"\xff" * 16), ("text", b"\x02" + b"\0" * 7 + b"[]")):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises((SafetensorsError, AttributeError)):
            read(file)
    assert Bert(tiny_bert(tmp_path / "good")).context_length == LONGEST
