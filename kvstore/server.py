"""The KV store's process: `python -m kvstore.server --config FILE`."""

from __future__ import annotations

import fcntl
import os
import ssl
from pathlib import Path

from kvmesh.v1 import pages_pb2_grpc

from kvstore.link_server import LinkServer
from kvstore.links import Links
from kvstore.metrics import StoreMetrics
from kvstore.options import store_options
from kvstore.service import ALLOWED, SERVICE_NAME, PagesService
from kvstore.store import Store
from kvstore.transfers import Transfers
from mesh.config import ConfigError, IdentityFiles, ServiceConfig
from mesh.nats_permissions import KV_EVENTS
from mesh.service import ServiceRuntime, main

STOP_GRACE_S = 1.0


async def serve(runtime: ServiceRuntime) -> None:
    """Takes up what is there, serves until told to stop."""
    config = runtime.config
    options = store_options(config.options)
    directory = options.directory or config.state_dir
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _only_store(directory / "kvstore.lock")
    nats = runtime.nats
    subject = f"{KV_EVENTS}.{config.node}"
    publish = None if nats is None else lambda data: nats.publish(subject, data)
    store = Store(directory, options, publish=publish)
    await store.start()
    runtime.registry.register(StoreMetrics(store))
    rpc = runtime.serve(ALLOWED)
    links = Links(lambda: runtime.identity.service_token("kvstore"), config.identity if config.tls else None)
    transfers = Transfers(
        store,
        runtime.verifier,
        lambda address: runtime.channel(address, "kvstore"),
        links,
        compress=options.compress,
        faults=runtime.faults,
    )
    byte_path = LinkServer(
        transfers.export, runtime.verifier, server_tls(config.identity) if config.tls else None
    )
    service = PagesService(store, transfers, runtime.verifier, node=config.node, faults=runtime.faults)
    pages_pb2_grpc.add_PagesServicer_to_server(service, rpc.server)
    await rpc.start([SERVICE_NAME])
    byte_path.listen(options.pages_listen or _beside(config))
    await runtime.announce(extra={"pages": byte_path.address} if options.byte_path else {})
    await runtime.ready()
    try:
        await runtime.stopping.wait()
    finally:
        store.end_sessions()
        links.close()
        await byte_path.close()
        await rpc.stop(STOP_GRACE_S)
        await store.close()
        os.close(lock)


def _beside(config: ServiceConfig) -> str:
    """Where pages are sent from: next to the socket, or at a port of its own."""
    if config.listen.startswith("unix:"):
        return f"{config.listen.removesuffix('.sock')}.pages.sock"
    return f"{config.listen.rpartition(':')[0]}:0"


def server_tls(files: IdentityFiles) -> ssl.SSLContext:
    """For a server that wants certificates of the mesh's CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key)
    return context


def _only_store(path: Path) -> int:
    """A lock that the process holds: two stores on one state directory would share pages."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another KV store runs on {path.parent}") from None
    return handle


if __name__ == "__main__":
    main(serve)
