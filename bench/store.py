"""How fast pages move: put into a node's store, got from another node's, asked for by id.

Two KV stores run as processes of their own on this machine, and this process is a
worker of each. `put` writes values into shared memory and commits them (checksum
included); `get` pulls them from the other node's store into memory, checksum
compared; `move` is the whole hand-over between nodes: from the write on one node
until the worker of the other has its lease. With --tls the stores talk over TCP with
mutual TLS, else over Unix sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc.aio
import uvloop
from kvmesh.v1 import pages_pb2, pages_pb2_grpc

from bench.command import Row
from kvstore.framing import SCHEME
from kvstore.links import Links, LinkSource
from kvstore.seals import seal
from mesh.blocks import chain, root_id
from mesh.ca import CertificateAuthority
from mesh.config import MetricsConfig, ServiceConfig, write_config
from mesh.identity import ServiceIdentity
from mesh.kv.client import KvClient
from mesh.kv.layout import Dtype, Layout, Plane, PlaneKind, layout_to_proto
from mesh.kv.page import CommitItem, Page
from mesh.rpc import open_channel
from mesh.supervisor.ports import Ports
from mesh.supervisor.sweep import remove_arenas

KIB, MIB = 1024, 1024 * 1024
FINGERPRINT = b"b" * 16
POOL_BYTES = 192 * MIB
LOOKUP_IDS = 10_000
RESERVED_BYTES = 64 * MIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="TCP with mutual TLS between the stores")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement (default 1.5)")


def run(arguments: argparse.Namespace) -> Row:
    return uvloop.run(_run(arguments.tls, arguments.seconds))


class _Stores:
    """Two stores of one mesh, and who speaks with them."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.tls = tls
        self._folder = folder
        self._ca = CertificateAuthority.open_or_create(folder / "ca")
        self._ports = Ports()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._addresses: dict[str, tuple[str, str]] = {}
        self.channels: list[grpc.aio.Channel] = []

    def start(self, node: str) -> None:
        home = self._folder / node
        home.mkdir()
        (home / "token").write_text("none\n")
        name = f"kvstore-{node}"
        if self.tls:
            listen, pages = (f"127.0.0.1:{self._ports.take()}" for _ in range(2))
        else:
            listen, pages = f"unix:{home}/s.sock", f"unix:{home}/p.sock"
        self._addresses[node] = (listen, pages)
        config = ServiceConfig(
            name=name, role="kvstore", node=node, state_dir=home, run_dir=home, listen=listen,
            advertise=listen, tls=self.tls, metrics=MetricsConfig("127.0.0.1", 0, home / "token"),
            identity=self._ca.issue(self._folder / "id", role="kvstore", name=name, hosts=["127.0.0.1"]),
            options={"kv_bytes": 3 * POOL_BYTES, "models": 2, "pages_listen": pages},
        )  # fmt: skip
        write_config(home / "config.json", config)
        command = [sys.executable, "-m", "kvstore.server", "--config", str(home / "config.json")]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def identity(self, role: str) -> ServiceIdentity:
        return ServiceIdentity.load(self._ca.issue(self._folder / "id", role=role, name=f"{role}-0"))

    def channel(self, node: str, role: str) -> grpc.aio.Channel:
        channel = open_channel(
            self._addresses[node][0], self.identity(role), callee_role="kvstore", tls=self.tls
        )
        self.channels.append(channel)
        return channel

    def pages_address(self, node: str) -> str:
        return SCHEME + self._addresses[node][1]

    def links(self) -> Links:
        identity = self.identity("kvstore")
        files = self._ca.issue(self._folder / "id", role="kvstore", name="kvstore-0")
        return Links(lambda: identity.service_token("kvstore"), files)

    def capability(self, handoff: str, model: str, ids: Sequence[bytes]) -> str:
        claims = {"org": "bench", "handoff": handoff, "last_block": ids[-1].hex(), "model": model}
        return self.identity("router").mint(claims, audience="data", ttl_s=600)

    async def worker(self, node: str, role: str, model: str, page_bytes: int) -> KvClient:
        return await KvClient.attach(
            self.channel(node, role),
            worker=f"{role}-0",
            model=model,
            fingerprint=FINGERPRINT,
            layout=_layout(page_bytes),
        )

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close(None)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        for node in self._addresses:
            remove_arenas(self._folder / node)


def _layout(page_bytes: int) -> Layout:
    return Layout(16, page_bytes, (Plane(0, 0, PlaneKind.K, 1, page_bytes // 64, Dtype.F32, 0),))


class _Pages:
    """Values of one size: a worker on either node, and what was put."""

    def __init__(self, stores: _Stores, here: KvClient, there: KvClient, model: str) -> None:
        self.stores, self.here, self.there, self.model = stores, here, there, model
        self.page_bytes = here.page_bytes
        self._value = os.urandom(self.page_bytes)
        self._numbers = itertools.count()

    def new(self, n: int) -> tuple[str, bytes, list[bytes]]:
        number = next(self._numbers)
        root = root_id(b"bench", FINGERPRINT)
        return f"{self.model}/{number}", root, chain(root, [(number << 16) + i for i in range(16 * n)])

    async def put(self, handoff: str, root: bytes, ids: list[bytes]) -> None:
        """Reserves here, writes every page and commits them, in one rpc each."""
        capability = self.stores.capability(handoff, self.model, ids)
        await self.here.reserve(handoff, capability, ids, root, 0, attempt=1)
        drawn = await self.here.draw(handoff, 1, capability)
        await self.write(handoff, root, ids, drawn.writable)

    async def write(
        self, handoff: str, root: bytes, ids: list[bytes], pages: Sequence[tuple[int, Page]]
    ) -> None:
        size = self.page_bytes
        for _, page in pages:
            self.here.arena[page.index * size : (page.index + 1) * size] = self._value
        items = [CommitItem(page, ids[i], ids[i - 1] if i else root) for i, page in pages]
        await self.here.commit(handoff, items, 1)

    async def move(self, n: int) -> None:
        """From the first write here until the last lease there."""
        handoff, root, ids = self.new(n)
        capability = self.stores.capability(handoff, self.model, ids)
        await self.there.reserve(handoff, capability, ids, root, 0)
        address = self.stores.pages_address("a")
        fetching = asyncio.create_task(self.there.fetch(handoff, 1, capability, root, address))
        await self.put(handoff, root, ids)
        await fetching
        await self.here.release(handoff)
        await self.there.release(handoff)


class _Drawn:
    """Puts as prefill does: a whole prompt is reserved, then its blocks are committed as they come."""

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages
        self._handoff, self._root = "", b""
        self._ids: list[bytes] = []
        self._left: list[tuple[int, Page]] = []

    async def put(self, n: int) -> None:
        pages = self._pages
        if len(self._left) < n:
            await self.end()
            self._handoff, self._root, self._ids = pages.new(RESERVED_BYTES // pages.page_bytes)
            capability = pages.stores.capability(self._handoff, pages.model, self._ids)
            await pages.here.reserve(self._handoff, capability, self._ids, self._root, 0, attempt=1)
            self._left = (await pages.here.draw(self._handoff, 1, capability)).writable
        now, self._left = self._left[:n], self._left[n:]
        await pages.write(self._handoff, self._root, self._ids, now)

    async def end(self) -> None:
        if self._handoff:
            await self._pages.here.release(self._handoff)
            self._handoff, self._left = "", []


async def _rate(seconds: float, n_bytes: int, work: Callable[[], Awaitable[None]]) -> float:
    """GB/s of repeating `work` that moves `n_bytes`."""
    await work()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        await work()
        done += n_bytes
    return done / (time.perf_counter() - began) / 1e9


async def _measure(pages: _Pages, name: str, n: int, seconds: float) -> dict[str, object]:
    """put, get and move of `n` pages at a time."""
    size = n * pages.page_bytes

    drawn = _Drawn(pages)
    row: dict[str, object] = {f"put_{name}_gb_s": await _rate(seconds, size, lambda: drawn.put(n))}
    await drawn.end()
    handoff, root, ids = pages.new(n)
    await pages.put(handoff, root, ids)
    links, memory = pages.stores.links(), mmap.mmap(-1, size)
    places = {
        block: memoryview(memory)[i * pages.page_bytes : (i + 1) * pages.page_bytes]
        for i, block in enumerate(ids)
    }
    parents = dict(zip(ids, [root, *ids], strict=False))
    source = LinkSource(
        links,
        pages.stores.pages_address("a"),
        pages_pb2.PullRequest(
            capability=pages.stores.capability(handoff, pages.model, ids),
            layout=layout_to_proto(_layout(pages.page_bytes)),
            model=pages.model,
            content_fingerprint=FINGERPRINT,
        ),
    )

    async def get() -> None:
        async for batch in source.pull(handoff, places):
            if any(a.seal != seal(a.block_id, parents[a.block_id], a.found) for a in batch):
                raise RuntimeError("a page arrived corrupt")

    row[f"get_{name}_gb_s"] = await _rate(seconds, size, get)
    if n == 1:
        took: list[float] = []
        for _ in range(500):
            began = time.perf_counter()
            await get()
            took.append(time.perf_counter() - began)
        row[f"get_{name}_p50_us"] = statistics.median(took) * 1e6
        row[f"get_{name}_p99_us"] = statistics.quantiles(took, n=100)[98] * 1e6
    links.close()
    await pages.here.release(handoff)
    row[f"move_{name}_gb_s"] = await _rate(seconds, size, lambda: pages.move(n))
    return row


async def _lookup(pages: _Pages, seconds: float) -> dict[str, object]:
    """Ids per second of one Lookup after another, half of the chains cached."""
    n = POOL_BYTES // pages.page_bytes // 4
    handoff, root, ids = pages.new(n)
    await pages.put(handoff, root, ids)
    stub = pages_pb2_grpc.PagesStub(pages.stores.channel("a", "router"))
    per_chain = min(n, 250)
    chains = [b"".join(ids[:per_chain])] * (LOOKUP_IDS // per_chain)
    request = pages_pb2.LookupRequest(
        model=pages.model, content_fingerprint=FINGERPRINT, packed_chains=chains
    )
    asked = per_chain * len(chains)

    async def lookup() -> None:
        response = await stub.Lookup(request)
        if list(response.prefix_blocks) != [per_chain] * len(chains):
            raise RuntimeError("Lookup does not find what was put")

    rate = await _rate(seconds, asked, lookup)
    await pages.here.release(handoff)
    return {"lookup_ids_per_s": rate * 1e9, "lookup_ids_per_call": asked}


async def _run(tls: bool, seconds: float) -> Row:
    folder = Path(tempfile.mkdtemp(prefix="kvbench"))
    stores = _Stores(folder, tls=tls)
    row: dict[str, object] = {"transport": "tcp, mutual TLS" if tls else "unix sockets"}
    try:
        for node in ("a", "b"):
            stores.start(node)
        clients: list[KvClient] = []
        for model, page_bytes, sizes in (
            ("pages-of-64k", 64 * KIB, (("64k", 1), ("64k_pipelined", 256))),
            ("pages-of-1m", MIB, (("1m", 1), ("16m", 16))),
        ):
            here = await stores.worker("a", "prefill", model, page_bytes)
            there = await stores.worker("b", "decode", model, page_bytes)
            clients += [here, there]
            pages = _Pages(stores, here, there, model)
            for name, n in sizes:
                row |= await _measure(pages, name, n, seconds)
            if page_bytes == 64 * KIB:
                row |= await _lookup(pages, seconds)
        for client in clients:
            await client.close()
    finally:
        with contextlib.suppress(Exception):
            await stores.close()
        shutil.rmtree(folder, ignore_errors=True)
    return row
