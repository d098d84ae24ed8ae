"""The process that keeps responses: `python -m response_store.server --config FILE`."""

from __future__ import annotations

import sqlite3

from kvmesh.v1 import responses_pb2_grpc
from prometheus_client import Gauge

from mesh.config import ConfigError
from mesh.service import STOP_GRACE_S, ServiceRuntime, main
from response_store.options import shelf_options
from response_store.service import ALLOWED, SERVICE_NAME, ResponsesService
from response_store.shelf import Shelf


async def serve(runtime: ServiceRuntime) -> None:
    """Takes up what is there, serves until told to stop."""
    config = runtime.config
    path = config.state_dir / "responses" / "responses.sqlite"
    try:
        shelf = await Shelf.open(path, shelf_options(config.options))
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{path}: {error}") from error
    _measure(runtime, shelf)
    rpc = runtime.serve(ALLOWED)
    responses_pb2_grpc.add_ResponsesServicer_to_server(ResponsesService(shelf, runtime.verifier), rpc.server)
    await rpc.start([SERVICE_NAME])
    await runtime.announce()
    await runtime.ready()
    try:
        await runtime.stopping.wait()
    finally:
        await rpc.stop(STOP_GRACE_S)
        await shelf.close()


def _measure(runtime: ServiceRuntime, shelf: Shelf) -> None:
    def gauge(name: str, text: str) -> Gauge:
        return Gauge(f"kvmesh_{name}", text, registry=runtime.registry)

    gauge("kept_responses", "Responses that are kept.").set_function(lambda: shelf.kept)
    gauge("kept_responses_bytes", "Bytes of them.").set_function(lambda: shelf.kept_bytes)


if __name__ == "__main__":
    main(serve)
