"""A store, prefill and decode workers in this process, over real Unix sockets, and a router made for tests.

The workers run the `serve` of their `server.py`. There is no NATS and no edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from kvmesh.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    pages_pb2,
    pages_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

import decode.server
import kvstore.server
import prefill.server
from mesh.blocks import chain, root_id
from mesh.ca import CertificateAuthority
from mesh.config import IdentityFiles, MetricsConfig, ModelConfig, ServiceConfig
from mesh.identity import ServiceIdentity
from mesh.rpc import open_channel
from mesh.service import Serve, ServiceRuntime

P = 16
LIVENESS_S = 30.0
SALT = b"the salt of an organisation"
SERVES: Mapping[str, Serve] = {
    "kvstore": kvstore.server.serve,
    "prefill": prefill.server.serve,
    "decode": decode.server.serve,
}


class _Runtime(ServiceRuntime):
    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self.became_ready = asyncio.Event()
        self.fingerprint = ""
        self.extra: dict[str, str] = {}

    def announce(self, **member: Any) -> asyncio.Task[None]:
        self.fingerprint = member.get("fingerprint", "")
        self.extra = member.get("extra") or {}
        return super().announce(**member)

    def ready(self, value: bool = True) -> asyncio.Task[None]:
        self.became_ready.set()
        return super().ready(value)


@dataclass
class Service:
    runtime: _Runtime
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.runtime.stopping.set()
        try:
            await asyncio.wait_for(self.task, LIVENESS_S)
        finally:
            await self.runtime.close()

    def metric(self, name: str) -> float:
        value = self.runtime.registry.get_sample_value(name)
        assert value is not None, name
        return value


class MiniMesh:
    """One node with one model."""

    def __init__(self, directory: Path, model: str, pages: int) -> None:
        self.directory = directory
        self.model = model
        self.pages = pages
        self.ca = CertificateAuthority.open_or_create(directory / "ca")
        self.services: dict[str, Service] = {}

    def identity(self, role: str, name: str) -> IdentityFiles:
        return self.ca.issue(self.directory / "ids", role=role, name=name)

    def socket(self, name: str) -> str:
        return f"unix:{self.directory / name}.sock"

    async def start(self, role: str, name: str, **options: Any) -> Service:
        token = self.directory / "metrics-token"
        token.write_text("token")
        if role == "kvstore":
            options = {"kv_bytes": 1 << 20, "page_pool": self.pages, **options}
        config = ServiceConfig(
            name=name,
            role=role,
            node="node",
            state_dir=self.directory,
            run_dir=self.directory,
            listen=self.socket(name),
            advertise=self.socket(name),
            tls=False,
            identity=self.identity(role, name),
            metrics=MetricsConfig("127.0.0.1", 0, token),
            kvstore=self.socket("kvstore-0"),
            model=None if role == "kvstore" else ModelConfig("m", self.model, self.model),
            options=options,
        )
        runtime = _Runtime(config)
        task = asyncio.create_task(_serve(SERVES[role], runtime))
        service = Service(runtime, task)
        ready = asyncio.create_task(runtime.became_ready.wait())
        await asyncio.wait({ready, task}, timeout=LIVENESS_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            task.result()
        self.services[name] = service
        return service

    async def stats(self) -> pages_pb2.ArenaStats:
        identity = ServiceIdentity.load(self.identity("operator", "operator"))
        async with open_channel(
            self.socket("kvstore-0"), identity, callee_role="kvstore", tls=False
        ) as channel:
            response = await pages_pb2_grpc.PagesStub(channel).Stats(pages_pb2.StatsRequest())
        assert not response.violations, list(response.violations)
        [arena] = response.arenas
        return arena

    async def nothing_leased(self) -> None:
        """Waits until no page is leased and no reservation left: a liveness limit, not a measurement."""
        async with asyncio.timeout(LIVENESS_S):
            while True:
                stats = await self.stats()
                if not (stats.leased or stats.reservations or stats.quarantined):
                    return
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for name in sorted(self.services, reverse=True, key=lambda n: not n.startswith("kvstore")):
            await self.services[name].stop()


async def _serve(serve: Serve, runtime: ServiceRuntime) -> None:
    await serve(runtime)


@contextlib.asynccontextmanager
async def mini_mesh(
    directory: Path,
    model: str = "tiny:seed=1",
    *,
    pages: int = 256,
    prefill: int = 1,
    decode: int = 1,
    **options: Any,
) -> AsyncIterator[MiniMesh]:
    mesh = MiniMesh(directory, model, pages)
    try:
        await mesh.start("kvstore", "kvstore-0")
        for i in range(prefill):
            await mesh.start("prefill", f"prefill-{i}")
        for i in range(decode):
            await mesh.start("decode", f"decode-{i}", **options)
        yield mesh
    finally:
        await mesh.close()


@dataclass
class Answer:
    """What came of one request. `ending` is the DoneReason's or RefuseReason's short name."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[common_pb2.PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[common_pb2.PositionLogprobs]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    rows: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    have: int = -1
    alone: bool = False
    ready: bool = False
    ran_prefill: bool = False
    ending: str = ""
    message: str = ""
    error: common_pb2.ErrorDetail = field(default_factory=common_pb2.ErrorDetail)
    computed_prompt_tokens: int = 0
    preempted: int = 0

    @property
    def text(self) -> bytes:
        return bytes(t for t in self.tokens.get(0, []) if t < 256)


class Handoff:
    """One opened request, seen from the router."""

    def __init__(self, router: TestRouter, message: decode_pb2.Open) -> None:
        self.router = router
        self.open = message
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        self.answer = Answer()
        self.on_row: Callable[[decode_pb2.StepRow], None] = lambda row: None
        self.first_row = asyncio.Event()

    @property
    def id(self) -> str:
        return self.open.handoff_id

    def cancel(self, choice: int | None = None) -> None:
        self.router.send(cancel=decode_pb2.Cancel(handoff_id=self.id, choice=choice))

    def sources(self, attempt: int, prefill: str | None) -> None:
        message = decode_pb2.Sources(handoff_id=self.id, attempt=attempt)
        if prefill is None:
            message.self = True
        else:
            message.prefill_worker = prefill
        self.router.send(sources=message)

    async def until(self, kind: str) -> Any:
        """Takes frames in until one of that kind."""
        async with asyncio.timeout(LIVENESS_S):
            while True:
                name, frame = await self.frames.get()
                self._take(name, frame)
                if name == kind:
                    return frame
                assert name not in ("done", "refused"), (name, frame)

    async def finish(self) -> Answer:
        """Takes frames in until the last one."""
        async with asyncio.timeout(LIVENESS_S):
            while not self.answer.ending:
                self._take(*await self.frames.get())
        return self.answer

    def _take(self, name: str, frame: Any) -> None:
        answer = self.answer
        if name == "reserved":
            answer.have, answer.alone = frame.have, frame.alone
        elif name == "ready":
            assert not answer.ready, "ready twice"
            answer.ready = True
        elif name == "row":
            assert answer.ready, "a token before ready"
            answer.tokens.setdefault(frame.choice, []).extend(frame.token_ids)
            answer.logprobs.setdefault(frame.choice, []).extend(frame.logprobs)
            answer.prompt_logprobs.setdefault(frame.choice, []).extend(frame.prompt_logprobs)
            answer.rows.append((frame.choice, tuple(frame.token_ids)))
            assert frame.choice not in answer.finish, "a token after the last"
            if frame.finish_reason:
                answer.finish[frame.choice] = frame.finish_reason
            self.on_row(frame)
            self.first_row.set()
        elif name == "done":
            answer.ending = decode_pb2.DoneReason.Name(frame.reason).removeprefix("DONE_REASON_")
            answer.message, answer.error = frame.message, frame.error
            answer.computed_prompt_tokens = frame.computed_prompt_tokens
        elif name == "refused":
            answer.ending = decode_pb2.RefuseReason.Name(frame.reason).removeprefix("REFUSE_REASON_")
            answer.message, answer.error = frame.message, frame.error


class TestRouter:
    """Opens one session to one decode worker and drives requests through it."""

    __test__ = False
    _numbers = itertools.count()

    def __init__(self, mesh: MiniMesh, decode_worker: str = "decode-0") -> None:
        self.mesh = mesh
        self.name = f"router-{next(self._numbers)}"
        self.identity = ServiceIdentity.load(mesh.identity("router", self.name))
        self.worker = decode_worker
        self.handoffs: dict[str, Handoff] = {}
        self.beats: list[decode_pb2.Beat] = []
        self.done_twice: list[str] = []
        self._out: asyncio.Queue[decode_pb2.SessionRequest | None] = asyncio.Queue()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ids = itertools.count()
        fingerprint = bytes.fromhex(mesh.services[decode_worker].runtime.fingerprint)
        self.root = root_id(SALT, fingerprint)

    async def __aenter__(self) -> TestRouter:
        stub = decode_pb2_grpc.DecodeStub(self.channel(self.worker, "decode"))
        self.call = stub.Session(self._requests())
        await asyncio.wait_for(self.call.initial_metadata(), LIVENESS_S)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.leave()
        for channel in self._channels.values():
            await channel.close(None)

    async def leave(self) -> None:
        """Breaks the session."""
        self.call.cancel()
        self._out.put_nowait(None)
        await asyncio.wait({self._reader})

    def channel(self, name: str, role: str) -> grpc.aio.Channel:
        if name not in self._channels:
            self._channels[name] = open_channel(
                self.mesh.socket(name), self.identity, callee_role=role, tls=False
            )
        return self._channels[name]

    def send(self, **frame: Any) -> None:
        self._out.put_nowait(decode_pb2.SessionRequest(**frame))

    def capability(self, request_id: str, handoff_id: str, block_ids: Sequence[bytes]) -> str:
        claims = {
            "org": "org_1",
            "handoff": handoff_id,
            "last_block": block_ids[-1].hex() if block_ids else "",
            "model": "m",
            "request_id": request_id,
        }
        return self.identity.mint(claims, audience="data", ttl_s=600)

    def message(self, tokens: Sequence[int], **changes: Any) -> decode_pb2.Open:
        """A correct `open`; keyword arguments replace its fields."""
        request_id = changes.pop("request_id", f"{self.name}-{next(self._ids)}")
        handoff_id = changes.pop("handoff_id", f"{request_id}/{next(self._ids)}")
        max_tokens = changes.pop("max_tokens", 24)
        block_ids = chain(self.root, tokens[: (len(tokens) - 1) // P * P], P)
        stop = common_pb2.StopParams(
            max_tokens=max_tokens,
            min_tokens=changes.pop("min_tokens", 0),
            stop_token_ids=changes.pop("stop_ids", ()),
        )
        sampling = common_pb2.SamplingParams(**{"temperature": 0.0, "seed": 7, **changes.pop("sampling", {})})
        fields: dict[str, Any] = {
            "request_id": request_id,
            "handoff_id": handoff_id,
            "attempt": 1,
            "capability": self.capability(request_id, handoff_id, block_ids),
            "prompt": common_pb2.Prompt(
                segments=[common_pb2.Segment(tokens=common_pb2.TokenRun(ids=tokens))]
            ),
            "block_ids": block_ids,
            "root_id": self.root,
            "n": 1,
            "arrival_unix_ns": next(self._ids) + 1,
            "sampling": sampling,
            "stop": stop,
        }
        return decode_pb2.Open(**{**fields, **changes})

    def open(self, message: decode_pb2.Open) -> Handoff:
        handoff = Handoff(self, message)
        self.handoffs[message.handoff_id] = handoff
        self.send(open=message)
        return handoff

    def run_request(self, message: decode_pb2.Open, attempt: int, have: int) -> prefill_pb2.RunRequest:
        tokens = message.prompt.segments[0].tokens.ids[: len(message.block_ids) * P]
        request = prefill_pb2.RunRequest(
            request_id=message.request_id,
            handoff_id=message.handoff_id,
            attempt=attempt,
            capability=message.capability,
            prompt=common_pb2.Prompt(segments=[common_pb2.Segment(tokens=common_pb2.TokenRun(ids=tokens))]),
            block_ids=message.block_ids,
            arrival_unix_ns=message.arrival_unix_ns,
            root_id=message.root_id,
        )
        setattr(request, "from", have)
        return request

    def run(
        self, message: decode_pb2.Open, *, attempt: int = 1, have: int = 0, worker: str = "prefill-0"
    ) -> grpc.aio.UnaryStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]:
        stub = prefill_pb2_grpc.PrefillStub(self.channel(worker, "prefill"))
        return stub.Run(self.run_request(message, attempt, have))

    async def serve(self, handoff: Handoff, *, prefill: str | None = "prefill-0") -> Answer:
        """What a router does with an opened request; `prefill` None lets decode compute the prompt."""
        await self._first(handoff)
        if handoff.answer.ending:
            return handoff.answer
        if handoff.answer.have < len(handoff.open.block_ids) and not handoff.answer.alone:
            handoff.sources(1, prefill)
            if prefill is not None:
                await self._prefill(handoff, prefill)
        return await handoff.finish()

    async def generate(
        self, tokens: Sequence[int], *, prefill: str | None = "prefill-0", **changes: Any
    ) -> Answer:
        """One request, placed again as often as it is preempted or the pool is full."""
        message = self.message(tokens, **changes)
        answer = await self.serve(self.open(message), prefill=prefill)
        while answer.ending in ("PREEMPTED", "NO_PAGES", "BUSY"):
            if answer.ending != "PREEMPTED":
                await asyncio.sleep(0.02)
            made = answer.tokens.get(0, [])
            again = self.message(
                [*tokens, *made],
                **{**changes, "request_id": message.request_id, "arrival_unix_ns": message.arrival_unix_ns},
                generated=len(made),
            )
            following = await self.serve(self.open(again), prefill=prefill)
            following.tokens[0] = [*made, *following.tokens.get(0, [])]
            following.preempted = answer.preempted + (answer.ending == "PREEMPTED")
            answer = following
        return answer

    async def _first(self, handoff: Handoff) -> None:
        async with asyncio.timeout(LIVENESS_S):
            handoff._take(*await handoff.frames.get())

    async def _prefill(self, handoff: Handoff, worker: str) -> None:
        """Runs prefill until decode is ready, or is done with the request."""
        handoff.answer.ran_prefill = True
        call = self.run(handoff.open, have=handoff.answer.have, worker=worker)

        async def follow() -> None:
            async for _ in call:
                pass

        following = asyncio.create_task(follow())
        try:
            async with asyncio.timeout(LIVENESS_S):
                while not handoff.answer.ready and not handoff.answer.ending:
                    handoff._take(*await handoff.frames.get())
        finally:
            call.cancel()
            await asyncio.wait({following})
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                following.result()

    async def _requests(self) -> AsyncIterator[decode_pb2.SessionRequest]:
        while (request := await self._out.get()) is not None:
            yield request

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for response in self.call:
                name = response.WhichOneof("frame")
                if name == "beat":
                    self.beats.append(response.beat)
                elif name == "step":
                    for row in response.step.rows:
                        self.handoffs[row.handoff_id].frames.put_nowait(("row", row))
                elif name is not None:
                    frame = getattr(response, name)
                    self.handoffs[frame.handoff_id].frames.put_nowait((name, frame))
