"""One node for tests: a CA, a KV store over a real Unix socket, and workers."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import grpc.aio
from kvmesh.v1 import pages_pb2, pages_pb2_grpc

from kvstore.link_server import LinkServer
from kvstore.links import Links
from kvstore.options import StoreOptions
from kvstore.server import server_tls
from kvstore.service import ALLOWED, SERVICE_NAME, PagesService
from kvstore.store import Store
from kvstore.table import PageState
from kvstore.transfers import Transfers
from mesh.blocks import chain, root_id
from mesh.ca import CertificateAuthority
from mesh.config import MetricsConfig, ServiceConfig, write_config
from mesh.identity import ServiceIdentity, TokenVerifier
from mesh.kv.client import KvClient
from mesh.kv.layout import Dtype, Layout, Plane, PlaneKind
from mesh.kv.page import CommitItem, Page
from mesh.rpc import RpcServer, open_channel
from mesh.supervisor.sweep import remove_arenas

MODEL = "tiny"
FINGERPRINT = b"f" * 16
LAYOUT = Layout(
    page_tokens=16,
    page_bytes=2048,
    planes=(
        Plane(0, 0, PlaneKind.K, 1, 16, Dtype.F32, 0),
        Plane(0, 0, PlaneKind.V, 1, 16, Dtype.F32, 1024),
    ),
)
SALT = b"salt of acme" + bytes(4)


def prompt(n: int, *, seed: int = 0, salt: bytes = SALT) -> tuple[bytes, list[bytes]]:
    """Root and ids of a prompt of `n` blocks."""
    root = root_id(salt, FINGERPRINT)
    return root, chain(root, [seed * 1000 + i for i in range(16 * n)])


def items(root: bytes, ids: Sequence[bytes], pages: Sequence[tuple[int, Page]]) -> list[CommitItem]:
    """What a worker commits after it has written `pages` of (index, page)."""
    return [CommitItem(page, ids[i], ids[i - 1] if i else root) for i, page in pages]


@dataclass
class Node:
    """A store in this process, or as a process of its own, and everybody's identities."""

    path: Path
    ca: CertificateAuthority
    pages: int = 32
    debug_fill: bool = True
    name: str = "node0"
    compress: bool = False
    store: Store = field(init=False)
    tcp: bool = False
    grpc_only: bool = False
    disk_bytes: int = 0
    org_share: float = 1.0
    transfers: Transfers = field(init=False)
    links: Links = field(init=False)
    byte_path: LinkServer = field(init=False)
    events: list[bytes] = field(default_factory=list)
    _server: RpcServer | None = None
    _process: asyncio.subprocess.Process | None = None
    _channels: list[grpc.aio.Channel] = field(default_factory=list)

    def identity(self, role: str, name: str) -> ServiceIdentity:
        return ServiceIdentity.load(self.ca.issue(self.path / "id", role=role, name=name))

    def config(self) -> ServiceConfig:
        token = self.path / "token"
        token.write_text("secret\n")
        address = f"unix:{self.path}/kvstore.sock"
        return ServiceConfig(
            name="kvstore-0",
            role="kvstore",
            node=self.name,
            state_dir=self.path,
            run_dir=self.path,
            listen=address,
            advertise=address,
            tls=False,
            identity=self.ca.issue(self.path / "id", role="kvstore", name="kvstore-0"),
            metrics=MetricsConfig("127.0.0.1", 0, token),
            options={
                "kv_bytes": 1 << 20,
                "page_pool": self.pages,
                "debug_fill": self.debug_fill,
                "disk_bytes": self.disk_bytes,
                "org_share": self.org_share,
            },
        )

    async def start(self) -> None:
        """The store in this process."""

        async def publish(data: bytes) -> None:
            self.events.append(data)

        config = self.config()
        options = StoreOptions(
            kv_bytes=1 << 20,
            page_pool=self.pages,
            debug_fill=self.debug_fill,
            disk_bytes=self.disk_bytes,
            org_share=self.org_share,
        )
        self.store = Store(self.path, options, publish=publish)
        await self.store.start()
        self._server = RpcServer(config, ServiceIdentity.load(config.identity), allowed=ALLOWED)
        verifier, identity = TokenVerifier(self.ca.cert_file), ServiceIdentity.load(config.identity)
        self.links = Links(lambda: identity.service_token("kvstore"), config.identity)
        self.transfers = Transfers(self.store, verifier, self._dial, self.links, compress=self.compress)
        self.byte_path = LinkServer(self.transfers.export, verifier, server_tls(config.identity))
        self.byte_path.listen("127.0.0.1:0" if self.tcp else f"unix:{self.path}/pages.sock")
        service = PagesService(self.store, self.transfers, verifier, node=self.name)
        pages_pb2_grpc.add_PagesServicer_to_server(service, self._server.server)
        await self._server.start([SERVICE_NAME])

    async def stop(self, *, gracefully: bool = True) -> None:
        """Ends the store of this process, or as if it had been killed."""
        if self._server is None:
            return
        server, self._server = self._server, None
        if gracefully:
            self.store.end_sessions()
        self.links.close()
        await self.byte_path.close()
        await server.stop(0.5 if gracefully else None)
        if gracefully:
            await self.store.close()

    async def spawn(self, prefix: Sequence[str] = ()) -> None:
        """The store as a process; `prefix` is what it runs under, such as a namespace."""
        path = self.path / "kvstore.json"
        write_config(path, self.config())
        self._process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "kvstore.server",
            "--config",
            str(path),
            stdout=asyncio.subprocess.DEVNULL,
        )

    async def kill(self, number: int = signal.SIGKILL) -> int:
        """Ends that process; its exit status."""
        assert self._process is not None
        process, self._process = self._process, None
        process.send_signal(number)
        return await process.wait()

    @property
    def address(self) -> str:
        """Where other stores get pages from."""
        return f"unix:{self.path}/kvstore.sock" if self.grpc_only else self.byte_path.address

    @property
    def grpc_address(self) -> str:
        return f"unix:{self.path}/kvstore.sock"

    def _dial(self, address: str) -> grpc.aio.Channel:
        identity = ServiceIdentity.load(self.config().identity)
        channel = open_channel(address, identity, callee_role="kvstore", tls=False)
        self._channels.append(channel)
        return channel

    def channel(self, role: str, name: str) -> grpc.aio.Channel:
        channel = open_channel(
            f"unix:{self.path}/kvstore.sock", self.identity(role, name), callee_role="kvstore", tls=False
        )
        self._channels.append(channel)
        return channel

    def stub(self, role: str, name: str = "") -> Any:
        return pages_pb2_grpc.PagesStub(self.channel(role, name or f"{role}-0"))

    async def worker(self, name: str, role: str = "decode", **options: Any) -> KvClient:
        settings: dict[str, Any] = {
            "worker": name, "model": MODEL, "fingerprint": FINGERPRINT, "layout": LAYOUT, **options,
        }  # fmt: skip
        return await KvClient.attach(self.channel(role, name), **settings)

    def capability(self, handoff: str, ids: Sequence[bytes], *, org: str = "acme", **claims: Any) -> str:
        role = claims.pop("minted_by", "router")
        last = ids[-1].hex() if ids else ""
        known = {"org": org, "handoff": handoff, "last_block": last, "model": MODEL, "request_id": "r1"}
        return self.identity(role, f"{role}-0").mint({**known, **claims}, audience="data", ttl_s=60)

    def counts(self) -> dict[str, int]:
        """Pages by state in the store of this process."""
        (arena,) = self.store.arenas.values()
        return {state.name.lower(): n for state, n in arena.pool.counts().items() if n}

    async def stats(self) -> pages_pb2.StatsResponse:
        response = await self.stub("operator").Stats(pages_pb2.StatsRequest(), wait_for_ready=True)
        assert not response.violations, response.violations
        return response  # type: ignore[no-any-return]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)
        await self.stop(gracefully=False)
        if self._process is not None:
            await self.kill()
        remove_arenas(self.path)
        shutil.rmtree(self.path)


@asynccontextmanager
async def running_node(**options: Any) -> AsyncIterator[Node]:
    """A node whose store runs in this process."""
    path = Path(mkdtemp(prefix="kv"))
    node = Node(path, CertificateAuthority.open_or_create(path / "ca"), **options)
    try:
        yield node
    finally:
        await node.close()


@asynccontextmanager
async def two_nodes(**options: Any) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes of one mesh, both stores in this process."""
    async with running_node(name="a", **options) as first:
        path = Path(mkdtemp(prefix="kv"))
        second = Node(path, first.ca, name="b", **options)
        try:
            await first.start()
            await second.start()
            yield first, second
        finally:
            await second.close()


async def eventually(true: Callable[[], bool], what: str, *, within_s: float = 5.0) -> None:
    """For what another process or thread brings about, where nothing can be awaited."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


async def complete(kv: KvClient, handoff_id: str, within_s: float = 5.0) -> dict[int, Page]:
    """Every block that arrives for a reservation, until it is complete."""
    got: dict[int, Page] = {}
    async with asyncio.timeout(within_s):
        async for blocks in kv.committed(handoff_id):
            got.update(blocks)
    return got


async def compute(
    node: Node, kv: KvClient, handoff: str, root: bytes, ids: list[bytes], attempt: int = 0
) -> list[Page]:
    """What a prefill worker does: draw, write, commit block by block; the winners."""
    drawn = await kv.draw(handoff, attempt, node.capability(handoff, ids))
    winners: list[Page] = []
    for index, page in drawn.writable:
        write(kv, page, ids[index])
        winners += await kv.commit(handoff, items(root, ids, [(index, page)]), attempt)
    return winners


def write(kv: KvClient, page: Page, block_id: bytes) -> None:
    """Fills a page with what only this block has."""
    start = page.index * kv.page_bytes
    kv.arena[start : start + kv.page_bytes] = block_id * (kv.page_bytes // len(block_id))


def holds(kv: KvClient, page: Page, block_id: bytes) -> bool:
    """Whether a page holds what `write` wrote for the block."""
    start = page.index * kv.page_bytes
    return bytes(kv.arena[start : start + kv.page_bytes]) == block_id * (kv.page_bytes // len(block_id))


def leased(counts: dict[str, int]) -> int:
    return counts.get(PageState.LEASED.name.lower(), 0)
