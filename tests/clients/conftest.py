"""The mesh that public clients talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import Mesh, running
from tests.encode.tiny_bert import tiny_bert

# The names that the SDK's own tests ask for.
SCRIPTED = ("script", "gpt-6-astra", "gpt-3.5-turbo-instruct", "model")
VECTORS = ("vectors", "text-embedding-3-small")


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Scripted models, which say what they are told, one with random weights, a small real one, an encoder."""
    state = tmp_path_factory.mktemp("clients") / "state"
    bert = tiny_bert(tmp_path_factory.mktemp("bert") / "tiny")
    args = ["--router", "1", "--prefill", "1", "--decode", "1", "--kv-memory", "512M"]
    models = {"tiny": "tiny:seed=1", "smollm2": "pkg:smollm2"}
    models |= dict.fromkeys(SCRIPTED, "script:") | {name: str(bert) for name in VECTORS}
    for name, source in models.items():
        args += ["--model", f"{name}={source}"]
    with running(state, args) as made:
        yield made
