"""A real Envoy in front of a small HTTP server and a small authorization service."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from deploy.envoy import EdgeConfig, RouterEndpoint
from tests.deploy.edge_lab import (
    Authorization,
    Edge,
    Upstream,
    free_port,
    running_envoy,
    start_authorization,
)


@pytest.fixture
async def edge() -> AsyncIterator[tuple[Edge, grpc.aio.Server]]:
    directory = Path(tempfile.mkdtemp(prefix="kvm", dir="/tmp"))
    upstream, authorization = Upstream(), Authorization()
    config = EdgeConfig(
        host="127.0.0.1",
        port=free_port(),
        admin_socket=directory / "admin.sock",
        routers=(RouterEndpoint("router-0", directory / "r.openai.sock", f"unix:{directory}/r.sock"),),
        iam=(f"unix:{directory}/iam.sock",),
        router_token="router-token",
        iam_token="iam-token",
        router_retries=2,
    )
    server = await asyncio.start_unix_server(upstream.serve, config.routers[0].openai)
    iam = await start_authorization(authorization, config.iam[0])
    try:
        async with running_envoy(config, directory) as log:
            yield (
                Edge(f"http://127.0.0.1:{config.port}", directory, config, authorization, upstream, log),
                iam,
            )
    finally:
        server.close()
        await iam.stop(0)
        shutil.rmtree(directory)
