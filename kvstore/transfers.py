"""Both ends of the transfers of one store, and the ways to other stores."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc.aio
from kvmesh.v1 import common_pb2, pages_pb2

from kvstore.capability import check_capability
from kvstore.exports import Sending, Wanted, exported, matching
from kvstore.fields import block_ids, named
from kvstore.files import ArenaKey
from kvstore.framing import SCHEME
from kvstore.imports import Fetching, Import, Source
from kvstore.links import Links, LinkSource
from kvstore.peers import Dial, GrpcSource
from kvstore.spoiling import spoilt
from kvstore.store import Session, Store
from mesh.errors import InvalidRequest
from mesh.faults import NO_FAULTS, FaultPoints
from mesh.identity import TokenVerifier
from mesh.kv.layout import Layout, layout_from_proto, layout_to_proto

LAYOUTS_KEPT = 64


class Transfers:
    """`dial` opens a gRPC channel to another store, `links` are for those that offer the
    byte path; `compress` deflates pages on the way here."""

    def __init__(
        self,
        store: Store,
        verifier: TokenVerifier,
        dial: Dial,
        links: Links,
        *,
        compress: bool = False,
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self._store = store
        self._verifier = verifier
        self._dial = dial
        self._links = links
        self._compress = compress
        self._faults = faults
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._layouts: dict[bytes, tuple[bytes, Layout]] = {}

    async def export(self, request: pages_pb2.PullRequest) -> AsyncGenerator[list[Sending], None]:
        """Pages that another node wants; see `exported`. Raises MeshError where they are refused."""
        digest, layout = self._layout(request.layout)
        key = ArenaKey(request.model, request.content_fingerprint, digest)
        org = check_capability(
            self._verifier,
            request.capability,
            handoff_id=named(request.handoff_id, "handoff_id"),
            model=request.model,
        )
        wanted = Wanted(request.handoff_id, org, block_ids(request.block_ids), request.wait)
        arena, parts = matching(self._store.arenas.values(), key, layout)
        async for batch in exported(arena, wanted, self._store.settle, parts):
            # Nothing left of a batch is the end of the answer.
            yield spoilt(batch, self._faults)

    async def fetch(self, session: Session, order: Fetching, address: str, capability: str) -> int:
        """Brings the missing blocks of a reservation here; how many came. See `Import.run`."""
        request = pages_pb2.PullRequest(
            capability=capability,
            layout=layout_to_proto(session.layout),
            wait=True,
            model=session.arena.key.model,
            content_fingerprint=session.arena.key.fingerprint,
            compress=self._compress,
        )
        work = Import(session.arena, order, self._source(address, request), self._store.settle)
        await work.run()
        return work.pulled

    def _layout(self, message: common_pb2.PageLayout) -> tuple[bytes, Layout]:
        """A layout and its digest; every pull of a model brings the same one."""
        raw = message.SerializeToString(deterministic=True)
        known = self._layouts.get(raw)
        if known is None:
            layout = layout_from_proto(message)
            if len(self._layouts) > LAYOUTS_KEPT:
                self._layouts.clear()
            known = self._layouts[raw] = (layout.digest(), layout)
        return known

    def _source(self, address: str, request: pages_pb2.PullRequest) -> Source:
        if not address:
            raise InvalidRequest("the other store has no address", param="address")
        if address.startswith(SCHEME):
            return LinkSource(self._links, address, request)
        if address not in self._channels:
            try:
                self._channels[address] = self._dial(address)
            except ValueError as error:
                raise InvalidRequest(f"no way to the other store: {error}", param="address") from error
        return GrpcSource(self._channels[address], request)
