"""A node with a store in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kvstore.node import Node, running_node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running_node(pages=256) as node:
        await node.start()
        yield node
