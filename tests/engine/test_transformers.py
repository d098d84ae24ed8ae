"""Tiny random models of every architecture, rope variant and safetensors layout: as `transformers` computes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.executor import Logits
from tests.engine.pools import bind, run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 96, 90)]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GEMMA = {"head_dim": 32, "sliding_window": 16, "num_hidden_layers": 7, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "long_factor": [1.0 + i / 3 for i in range(8)],
    "short_factor": [1.0 + i / 9 for i in range(8)],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn by hand": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
        "beta_slow": 2.0, "attention_factor": 0.9,
    },
    "llama3": LLAMA3,
    "longrope": LONG,
}  # fmt: skip


def save(directory: Path, kind: str, *, shard: str = "5GB", dtype: str = "float32", **changes: Any) -> Any:
    """A random model in a directory, and itself in float32."""
    names = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    config_class, model_class = names[kind]
    values = {
        **SIZES,
        **({"head_dim": 16} if kind == "qwen3" else {}),
        **(GEMMA if kind == "gemma3" else {}),
        **changes,
    }
    config = config_class(**values, attn_implementation="eager")
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "bias" in name else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=shard)
    # Read again: a model that is made float32 in memory keeps a rope that was rounded to its old dtype.
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def logprobs(logits: Any) -> Any:
    exact = logits.astype(np.float64)
    exact = exact - exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def wanted(model: Any, tokens: list[int]) -> Any:
    # transformers reads the cap of attention from the configuration and forgets to hand it on.
    cap = getattr(model.config, "attn_logit_softcapping", None)
    options = {} if cap is None else {"softcap": cap}
    with torch.no_grad():
        return logprobs(model(torch.tensor([tokens]), **options).logits[0].numpy())


def found(directory: Path, executor: str, tokens: list[int]) -> Any:
    loaded = engine.load(str(directory), executor=executor, kv_dtype="f32")
    bind(loaded, 8)
    logits: Logits = run(loaded, tokens, range(8), [len(tokens) - 7, 1, 6])
    return logprobs(logits)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("executor", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("gemma3", {}),
        (
            "gemma3",
            {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
        ),
    ],
    ids=str,
)
def test_architectures(tmp_path: Path, kind: str, changes: dict[str, Any], executor: str) -> None:
    model = save(tmp_path, kind, **changes)
    np.testing.assert_allclose(found(tmp_path, executor, TOKENS), wanted(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(ROPES))
def test_rope_variants(tmp_path: Path, name: str) -> None:
    model = save(tmp_path, "llama", rope_parameters={"rope_theta": 10000.0, **ROPES[name]})
    np.testing.assert_allclose(found(tmp_path, "cpu", TOKENS), wanted(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spelling", ["type", "rope_type", "both"])
def test_the_old_spelling_of_a_rope(tmp_path: Path, spelling: str) -> None:
    rope = {"rope_theta": 5000.0, **ROPES["llama3"]}
    model = save(tmp_path, "llama", rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {
        key: value
        for key, value in config.pop("rope_parameters").items()
        if key not in ("rope_theta", "rope_type")
    }
    for key in ("type", "rope_type") if spelling == "both" else (spelling,):
        old[key] = "llama3"
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": old, "rope_theta": 5000.0}))
    np.testing.assert_allclose(found(tmp_path, "cpu", TOKENS), wanted(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_layouts_and_dtypes(tmp_path: Path, dtype: str, shard: str) -> None:
    model = save(tmp_path, "qwen2", dtype=dtype, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard == "60KB")
    np.testing.assert_allclose(found(tmp_path, "cpu", TOKENS), wanted(model, TOKENS), rtol=0, atol=1e-4)
