"""A Hugging Face directory served end to end; one that is broken is never ready."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import Mesh, free_port, running
from tests.engine.test_safetensors import CONFIG, header_of, tensors, write_file
from tests.text.test_hf import write

VOCAB = 300


def model(directory: Path) -> Path:
    """A random model over bytes, with tokenizer and template."""
    config = {**CONFIG, "vocab_size": VOCAB, "eos_token_id": None}
    write(directory, size=VOCAB, config=config)
    numbers = np.random.default_rng(2)
    arrays = tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[name] = numbers.standard_normal((VOCAB, 32)).astype(np.float32)
    write_file(directory / "model.safetensors", arrays, header_of(arrays))
    return directory


@pytest.mark.mesh
async def test_a_directory_is_served_and_every_end_token_ends(tmp_path: Path) -> None:
    directory = model(tmp_path / "m")
    with running(tmp_path / "state", ["--model", f"dir={directory}"]) as mesh:
        async with mesh.client() as client:
            for end in (257, 258, 259):  # of the tokenizer, of generation_config.json, by its name
                answer = await client.post(
                    "/v1/chat/completions",
                    json={
                        "model": "dir",
                        "messages": [{"role": "user", "content": "hi"}],
                        "max_tokens": 5,
                        "temperature": 0,
                        "logit_bias": {str(end): 100},
                    },
                )
                assert answer.status_code == 200, answer.text
                choice = answer.json()["choices"][0]
                assert choice["finish_reason"] == "stop"
                assert not choice["message"]["content"]


@pytest.mark.mesh
def test_a_directory_without_a_tensor_is_never_ready(tmp_path: Path) -> None:
    directory = model(tmp_path / "m")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    mesh = Mesh(state=tmp_path / "state", port=free_port(), args=["--model", f"dir={directory}"])
    try:
        with pytest.raises(AssertionError, match=r"mlp\.down_proj\.weight"):
            mesh.up()
    finally:
        mesh.cli("down", check=False)
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == VOCAB
