"""What holds for all tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine makes any example slow once; how fast something is, is for a test of its own to say.
settings.register_profile("kvmesh", deadline=None)
settings.load_profile("kvmesh")


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[None]:
    """Sockets of state directories with long names lie here, so that nothing stays in /tmp."""
    with tempfile.TemporaryDirectory(prefix="kvt") as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", path)
        yield
