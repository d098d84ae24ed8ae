"""Both ends of the transfers of one store, and the channels to other stores."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from kvstore.exports import Sending, Wanted, exported, matching
from kvstore.files import ArenaKey
from kvstore.imports import Fetching, Import
from kvstore.peers import Dial, GrpcSource
from kvstore.store import Session, Store
from mesh.errors import InvalidRequest
from mesh.kv.layout import layout_to_proto


class Transfers:
    """`dial` opens a channel to another store; `compress` deflates pages on the way here."""

    def __init__(self, store: Store, dial: Dial, *, compress: bool = False) -> None:
        self._store = store
        self._dial = dial
        self._compress = compress
        self._channels: dict[str, grpc.aio.Channel] = {}

    def export(self, key: ArenaKey, layout: str, wanted: Wanted) -> AsyncIterator[Sending]:
        """Pages that another node wants; see `exported`."""
        arena = matching(self._store.arenas.values(), key, layout)
        return exported(arena, wanted, self._store.settle)

    async def fetch(self, session: Session, order: Fetching, address: str, capability: str) -> int:
        """Brings the missing blocks of a reservation here; how many came. See `Import.run`."""
        if not address:
            raise InvalidRequest("the other store has no address", param="address")
        source = GrpcSource(
            self._channel(address),
            session.arena.key,
            layout_to_proto(session.layout),
            capability,
            compress=self._compress,
        )
        work = Import(session.arena, order, source, self._store.settle)
        await work.run()
        return work.pulled

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            try:
                self._channels[address] = self._dial(address)
            except ValueError as error:
                raise InvalidRequest(f"no way to the other store: {error}", param="address") from error
        return self._channels[address]
