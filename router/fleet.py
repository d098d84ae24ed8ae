"""All workers of the mesh as this router sees them.

Joins the news of members and load, the sessions to decode workers and the channels
to prefill workers into one `Placement`. A member is used when its stream or channel
works, whatever the news say of its age: with NATS gone the last known members go on
serving. It does not know requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
from kvmesh.v1 import pages_pb2, pages_pb2_grpc

from mesh.errors import Unavailable
from mesh.faults import NO_FAULTS, FaultPoints
from router.admission import Admission
from router.placement import LoadReport, Placement, Worker
from router.prefill_runs import Fault, RunFailure
from router.prefixes import BlockNews, PrefixIndex
from router.sessions import DecodeSession, Dial, Liveness

log = logging.getLogger(__name__)

PREFILL_REST_S = 2.0


class MemberNews(Protocol):
    """What a worker announces of itself (`mesh.members.Member`)."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def extra(self) -> Mapping[str, str]: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def stale(self) -> bool: ...


class Fleet:
    """`suspect(worker, reason)` tells the mesh of a hung worker."""

    def __init__(
        self,
        placement: Placement,
        admission: Admission,
        dial: Dial,
        *,
        liveness: Liveness,
        suspect: Callable[[str, str], None],
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self._faults = faults
        self.placement = placement
        self.admission = admission
        self.prefixes = PrefixIndex(self._list_blocks)
        self._dial = dial
        self._liveness = liveness
        self._suspect = suspect
        self._members: dict[str, MemberNews] = {}
        self._sessions: dict[str, DecodeSession] = {}
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_members(self, members: Mapping[str, MemberNews]) -> None:
        """The members have changed."""
        before, self._members = self._members, dict(members)
        for name in set(before) - set(members):
            self._left(before[name])
        for name, member in members.items():
            known = before.get(name)
            if known == member:
                continue
            if member.role in ("decode", "prefill"):
                self._joined(member, known)
            elif member.role == "kvstore" and known is not None and known.incarnation != member.incarnation:
                self.prefixes.forget(member.node)

    def on_load(self, worker: str, report: LoadReport) -> None:
        """News of a worker's load."""
        known = self.placement.get(worker)
        self.placement.said(worker, report)
        if known is not None and known.role == "decode":
            self.admission.pump(known.model)

    def on_blocks(self, subject: str, data: bytes) -> None:
        """News of a node's blocks."""
        news = read_block_news(subject, data)
        if news is not None:
            self.prefixes.heard(news)

    def session(self, worker: str) -> DecodeSession:
        """The stream to a decode worker; raises Unavailable."""
        session = self._sessions.get(worker)
        if session is None or not session.connected:
            raise Unavailable(f"worker {worker} cannot be reached")
        return session

    def prefill_channel(self, worker: str) -> grpc.aio.Channel:
        """The channel to a prefill worker; raises Unavailable."""
        member = self._members.get(worker)
        if member is None:
            raise Unavailable(f"worker {worker} has left")
        known = self._channels.get(worker)
        if known is None or known[0] != member.address:
            self._drop_channel(worker)
            known = (member.address, self._dial(member.address, "prefill"))
            self._channels[worker] = known
        return known[1]

    def store_address(self, node: str) -> str:
        """Where another node's store gets that node's pages from; raises Unavailable."""
        store = self._store(node)
        if store is None:
            raise Unavailable(f"the KV store of node {node} is not known")
        return store.extra.get("pages") or store.address

    def _store(self, node: str) -> MemberNews | None:
        return next((m for m in self._members.values() if m.role == "kvstore" and m.node == node), None)

    def prefill_failed(self, name: str, failure: RunFailure) -> None:
        """A run there broke. A worker that is at fault rests for a moment; the mesh is told of a hang."""
        log.warning("prefill run failed", extra={"worker": name, "reason": failure.reason})
        if failure.fault is Fault.HUNG:
            self._suspect(name, failure.reason)
        worker = self.placement.get(name)
        if worker is not None and worker.connected and failure.fault is not Fault.REQUEST:
            worker.connected = False
            asyncio.get_running_loop().call_later(PREFILL_REST_S, self._rested, name)

    def _rested(self, name: str) -> None:
        worker, member = self.placement.get(name), self._members.get(name)
        if worker is not None and member is not None:
            worker.connected = member.ready and not member.stale

    def hung(self, worker: str, reason: str) -> None:
        """A worker has work and makes no progress."""
        self._suspect(worker, reason)

    def serving(self) -> dict[str, bool]:
        """Models that have workers, and whether any of those can be reached."""
        models: dict[str, bool] = {}
        for worker in self.placement.workers("decode"):
            models[worker.model] = models.get(worker.model, False) or worker.usable
        return models

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await session.close()
        self._sessions.clear()
        for name in list(self._channels):
            self._drop_channel(name)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _joined(self, member: MemberNews, known: MemberNews | None) -> None:
        worker = self.placement.put(
            Worker(
                name=member.name,
                role=member.role,
                node=member.node,
                model=member.model,
                fingerprint=_fingerprint(member),
                capacity=member.capacity,
                draining=member.draining,
            )
        )
        anew = known is None or known.incarnation != member.incarnation or known.address != member.address
        if anew:
            worker.report = None
            self.placement.stir(worker)
        if member.role == "prefill":
            # A prefill worker is used by its word; a run that fails moves on to another.
            worker.connected = member.ready and not member.stale
            if anew:
                self._drop_channel(member.name)
        else:
            self._connect(member, hurry=anew or not known or not known.ready)
        self.admission.pump(member.model)

    def _connect(self, member: MemberNews, *, hurry: bool) -> None:
        session = self._sessions.get(member.name)
        if session is None:
            self._sessions[member.name] = DecodeSession(
                member.name,
                member.address,
                self._dial,
                liveness=self._liveness,
                on_change=partial(self._session_changed, member.name),
                on_hung=self.hung,
                faults=self._faults,
            )
        elif hurry:
            session.hurry(member.address)
        self._session_changed(member.name)

    def _session_changed(self, name: str) -> None:
        worker, session, member = self.placement.get(name), self._sessions.get(name), self._members.get(name)
        if worker is None or session is None:
            return
        # One that is starting has no place yet; a stale word is no reason to leave one that answers.
        worker.connected = session.connected and (member is None or member.ready)
        self.admission.pump(worker.model)

    def _left(self, member: MemberNews) -> None:
        if member.role == "kvstore":
            self.prefixes.forget(member.node)
        session = self._sessions.pop(member.name, None)
        if session is not None:
            self._later(session.close())
        self._drop_channel(member.name)
        worker = self.placement.get(member.name)
        if worker is not None:
            worker.connected = False
            self.placement.remove(member.name)
            self.admission.pump(worker.model)

    def _drop_channel(self, name: str) -> None:
        known = self._channels.pop(name, None)
        if known is not None:
            self._later(known[1].close(None))

    def _list_blocks(self, node: str) -> None:
        self._later(self._list_node(node))

    async def _list_node(self, node: str) -> None:
        """Asks a node's store for everything it has of the models that its workers serve."""
        store = self._store(node)
        chains = {(w.model, w.fingerprint) for w in self.placement.workers("decode") if w.node == node}
        if store is None or not chains:
            self.prefixes.listing_failed(node)
            return
        channel = self._dial(store.address, "kvstore")
        blocks: list[bytes] = []
        sequence: int | None = None
        try:
            for model, fingerprint in sorted(chains):
                request = pages_pb2.ListBlocksRequest(model=model, content_fingerprint=fingerprint)
                async for page in pages_pb2_grpc.PagesStub(channel).ListBlocks(request, timeout=30):
                    # The oldest listing decides: news after it are applied to all.
                    sequence = page.sequence if sequence is None else min(sequence, page.sequence)
                    blocks.extend(page.block_ids)
        except grpc.aio.AioRpcError as error:
            log.info("listing of blocks failed", extra={"node": node, "reason": error.code().name})
            self.prefixes.listing_failed(node)
            return
        finally:
            await channel.close(None)
        if sequence is None:
            self.prefixes.listing_failed(node)
        else:
            self.prefixes.listed(node, sequence, blocks)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def read_block_news(subject: str, data: bytes) -> BlockNews | None:
    """`kv.events.<node>`: a JSON object with seq, stored and removed (hex ids). None if malformed."""
    try:
        body = json.loads(data)
        return BlockNews(
            node=subject.removeprefix("kv.events."),
            sequence=int(body["seq"]),
            stored=tuple(bytes.fromhex(block) for block in body.get("stored", ())),
            removed=tuple(bytes.fromhex(block) for block in body.get("removed", ())),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("news of blocks are malformed", extra={"subject": subject})
        return None


def _fingerprint(member: MemberNews) -> bytes:
    try:
        return bytes.fromhex(member.fingerprint)
    except ValueError:
        return b""
