"""Meshes that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import Mesh, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.mesh)


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two of everything, a tiny model with random weights and the scripted model."""
    state = tmp_path_factory.mktemp("mesh") / "state"
    args = ["--router", "2", "--prefill", "2", "--decode", "2", "--kv-memory", "256M"]
    args += ["--model", "tiny=tiny:seed=1", "--model", "script=script:"]
    with running(state, args) as m:
        yield m


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """What `kvmesh up` serves with no configuration."""
    state = tmp_path_factory.mktemp("smollm2") / "state"
    with running(state, []) as m:
        yield m
