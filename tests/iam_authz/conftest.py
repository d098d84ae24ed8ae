from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.iam_authz.world import World, running_iam


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_iam(tmp_path) as running:
        yield running
