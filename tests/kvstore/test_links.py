"""The byte path: who may speak on it, and that whoever leaves is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest
from kvmesh.v1 import pages_pb2

from kvstore.framing import (
    MAGIC,
    Kind,
    part,
    read_error,
    receive,
    receive_header,
)
from kvstore.links import Links, LinkSource
from mesh.ca import role_dns_name
from mesh.errors import MeshError, PermissionDenied, Unauthenticated, Unavailable
from mesh.kv.layout import layout_to_proto
from tests.kvstore.node import (
    FINGERPRINT,
    LAYOUT,
    MODEL,
    Node,
    compute,
    eventually,
    items,
    prompt,
    running_node,
)


def _connect(node: Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(node.byte_path.address.removeprefix("pages+unix:"))
    return connection


def _ask(node: Node, token: str) -> MeshError:
    with _connect(node) as connection:
        connection.sendall(MAGIC + part(token.encode()) + part(b""))
        header = receive_header(connection)
        assert header.kind is Kind.ERROR
        return read_error(receive(connection, header.length))


async def test_only_stores_of_this_mesh_are_answered() -> None:
    async with running_node() as node, running_node() as stranger:
        await node.start()
        store = node.identity("kvstore", "kvstore-0")
        for token in (
            "",
            "nonsense",
            node.identity("decode", "decode-0").service_token("kvstore"),
            store.service_token("decode"),
            stranger.identity("kvstore", "kvstore-0").service_token("kvstore"),
        ):
            assert isinstance(await asyncio.to_thread(_ask, node, token), Unauthenticated)
        # Known, but an empty request names no layout.
        assert not isinstance(
            await asyncio.to_thread(_ask, node, store.service_token("kvstore")), Unauthenticated
        )


async def test_nonsense_breaks_the_connection_and_nothing_else() -> None:
    async with running_node() as node:
        await node.start()

        def says(data: bytes) -> bytes:
            with _connect(node) as connection:
                connection.sendall(data)
                with contextlib.suppress(ConnectionResetError):
                    return connection.recv(100)
                return b""

        token = node.identity("kvstore", "kvstore-0").service_token("kvstore").encode()
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            MAGIC + b"\xff\xff\xff\xff",
            MAGIC + part(token) + b"\xff" * 4,
        ):
            assert await asyncio.to_thread(says, data) == b""
        assert isinstance(await asyncio.to_thread(_ask, node, ""), Unauthenticated)
        await eventually(lambda: not node.byte_path.connections, "a connection stays")


async def test_under_tls_a_caller_needs_the_certificate_that_its_token_names() -> None:
    async with running_node(tcp=True) as node:
        await node.start()
        host, _, port = node.byte_path.address.removeprefix("pages+").rpartition(":")

        def ask(role: str | None, token: str) -> str:
            context = ssl.create_default_context(cafile=str(node.ca.cert_file))
            if role is not None:
                files = node.ca.issue(node.path / "id", role=role, name=f"{role}-7")
                context.load_cert_chain(files.cert, files.key)
            with (
                socket.create_connection((host, int(port)), 5) as plain,
                context.wrap_socket(plain, server_hostname=role_dns_name("kvstore")) as connection,
            ):
                connection.sendall(MAGIC + part(token.encode()) + part(b""))
                header = receive_header(connection)
                return read_error(receive(connection, header.length)).code or ""

        token = node.identity("kvstore", "kvstore-0").service_token("kvstore")
        assert await asyncio.to_thread(ask, "decode", token) == "invalid_mesh_token"
        with pytest.raises(OSError):
            await asyncio.to_thread(ask, None, token)


async def test_a_caller_that_leaves_while_nothing_is_there_is_noticed() -> None:
    root, ids = prompt(4)
    async with running_node() as node:
        await node.start()
        prefill = await node.worker("prefill-0", "prefill")
        await prefill.reserve("h", node.capability("h", ids), ids, root, 0, attempt=1)
        identity = node.identity("kvstore", "kvstore-1")
        links = Links(lambda: identity.service_token("kvstore"), None)
        source = LinkSource(
            links,
            node.byte_path.address,
            pages_pb2.PullRequest(
                capability=node.capability("h", ids), layout=layout_to_proto(LAYOUT), wait=True,
                model=MODEL, content_fingerprint=FINGERPRINT,
            ),
        )  # fmt: skip
        places = {block: memoryview(bytearray(LAYOUT.page_bytes)) for block in ids}

        async def pull(handoff: str) -> int:
            return sum([len(batch) async for batch in source.pull(handoff, places)])

        (arena,) = node.store.arenas.values()
        pulling = asyncio.create_task(pull("h"))
        await eventually(lambda: len(arena.pool.owners) == 2, "the pull did not begin")
        pulling.cancel()
        await asyncio.wait({pulling})
        await eventually(lambda: len(arena.pool.owners) == 1, "the sender waits for nobody")
        await compute(node, prefill, "h", root, ids, 1)
        assert await pull("h") == 4
        assert await pull("h") == 4
        with pytest.raises(PermissionDenied):
            await pull("another")
        await node.byte_path.close()
        with pytest.raises(Unavailable):
            await pull("h")
        links.close()


async def test_small_pulls_one_after_another_and_in_between_large_ones() -> None:
    """One connection: what is small goes by the loops, what is large by threads, neither disturbs the other."""
    root, ids = prompt(120)
    small, large = ids[:2], ids
    async with running_node(pages=128, debug_fill=False) as node:
        await node.start()
        prefill = await node.worker("prefill-0", "prefill")
        await prefill.reserve("h", node.capability("h", ids), ids, root, 0, attempt=1)
        await compute(node, prefill, "h", root, ids, 1)
        identity = node.identity("kvstore", "kvstore-1")
        links = Links(lambda: identity.service_token("kvstore"), None)
        source = LinkSource(
            links,
            node.byte_path.address,
            pages_pb2.PullRequest(
                capability=node.capability("h", ids), layout=layout_to_proto(LAYOUT),
                model=MODEL, content_fingerprint=FINGERPRINT,
            ),
        )  # fmt: skip
        for wanted in (small, large, small, small, large, small):
            places = {block: memoryview(bytearray(LAYOUT.page_bytes)) for block in wanted}
            arrived = [a.block_id async for batch in source.pull("h", places) for a in batch]
            assert sorted(arrived) == sorted(wanted)
            assert all(bytes(place[:16]) == block for block, place in places.items())
        assert len(node.byte_path.connections) == 1
        places = {b"?" * 16: memoryview(bytearray(LAYOUT.page_bytes))}
        with pytest.raises(MeshError) as refused:
            _ = [batch async for batch in source.pull("h", places)]
        assert refused.value.code == "foreign_block"
        links.close()


async def test_a_small_pull_that_is_given_up_leaves_nothing() -> None:
    root, ids = prompt(2)
    async with running_node() as node:
        await node.start()
        prefill = await node.worker("prefill-0", "prefill")
        await prefill.reserve("h", node.capability("h", ids), ids, root, 0, attempt=1)
        drawn = await prefill.draw("h", 1, node.capability("h", ids))
        await prefill.commit("h", items(root, ids, drawn.writable[:1]), 1)
        identity = node.identity("kvstore", "kvstore-1")
        links = Links(lambda: identity.service_token("kvstore"), None)
        source = LinkSource(
            links,
            node.byte_path.address,
            pages_pb2.PullRequest(
                capability=node.capability("h", ids), layout=layout_to_proto(LAYOUT), wait=True,
                model=MODEL, content_fingerprint=FINGERPRINT,
            ),
        )  # fmt: skip
        (arena,) = node.store.arenas.values()

        async def pull(wanted: list[bytes]) -> int:
            places = {block: memoryview(bytearray(LAYOUT.page_bytes)) for block in wanted}
            return sum([len(batch) async for batch in source.pull("h", places)])

        assert await pull(ids[:1]) == 1
        waiting = asyncio.create_task(pull(ids))
        await eventually(lambda: len(arena.pool.owners) == 2, "the pull did not begin")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: len(arena.pool.owners) == 1, "it is still being sent")
        assert await pull(ids[:1]) == 1
        links.close()
