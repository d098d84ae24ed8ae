"""The router's process: `python -m router.server --config FILE`.

Builds everything once and joins it: the core, what it decides by (policy, texts),
where work is done (workers, queue), the two faces, and the news.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import grpc.aio
from kvmesh.v1 import iam_pb2, iam_pb2_grpc, inference_pb2, inference_pb2_grpc

from mesh.identity import EDGE_ROLE
from mesh.members import Member
from mesh.models import resolve
from mesh.news import Load, News
from mesh.rpc import open_channel
from mesh.service import ServiceRuntime, main
from mesh.telemetry.reading import TRACES
from router import wire
from router.admission import Admission
from router.core.core import Core
from router.core.exchange import Books
from router.core.floor import Floor
from router.core.generation import CAPABILITY_TTL_S
from router.core.metrics import RouterMetrics
from router.core.policy import Snapshot
from router.core.policy_watch import PolicyHolder
from router.core.quota import Unlimited
from router.core.texts import TextModels
from router.core.usage import UsageOutbox
from router.encoders import Encoders
from router.fleet import Fleet
from router.grpc_face import SERVICE, InferenceServicer
from router.kept import KeptResponses
from router.openai.app import openai_app
from router.openai.envoy_spans import EnvoySpans
from router.openai.http_server import HttpServer
from router.options import RouterOptions
from router.placement import LoadReport, Placement
from text import TextModel, load_text_model

log = logging.getLogger(__name__)

# Until then whoever comes is better off with another router, or waits for this one.
FIRST_POLICY_S = 5.0
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ALLOWED = {SERVICE: frozenset({EDGE_ROLE})}


class Router:
    """All parts of one router, in the order in which they are built."""

    def __init__(self, runtime: ServiceRuntime) -> None:
        config = runtime.config
        self.runtime = runtime
        self.options = options = RouterOptions.of(config)
        self.metrics = metrics = RouterMetrics(runtime.registry)
        self.outbox = UsageOutbox(config.state_dir / "outbox" / f"{config.name}.usage", self._publish_usage)
        self.policy = PolicyHolder(config.iam, self._watch_policy, usable_s=options.policy_usable_s)
        self.texts = TextModels(self._load_text, adjust=options.parsers.of)
        placement = Placement()
        admission = Admission(placement, options.patience)
        admission.on_waiting = lambda model, waiting: metrics.waiting.labels(model).set(waiting)
        self.fleet = Fleet(
            placement,
            admission,
            self._dial,
            liveness=options.liveness,
            suspect=self._suspect,
            faults=runtime.faults,
        )
        self.encoders = Encoders(self._dial, self._mint)
        self.core = Core(
            verifier=runtime.verifier,
            policy=self.policy,
            texts=self.texts,
            floor=Floor(
                self.fleet,
                admission,
                self._mint,
                f"{config.name}.{secrets.token_hex(3)}",
                options.run_patience,
                faults=runtime.faults,
            ),
            quota=Unlimited(),
            books=Books(runtime.tracer, metrics, self.outbox.add),
            encoders=self.encoders,
            kept=self._kept_responses(),
        )
        self.spans = EnvoySpans(
            config.state_dir / TRACES / f"envoy.{config.name}.jsonl", runtime.forward_spans
        )
        self.http = HttpServer(
            openai_app(self.core, runtime.verifier, self.spans, self.readiness),
            socket_path=options.openai_socket,
            port=options.openai_port,
            grace_s=options.drain_s,
        )
        self._serving = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.policy.on_change += [self.texts.on_snapshot, self._policy_arrived]

    async def start(self) -> None:
        """Serves as soon as there is something to decide by, or to say that there is nothing."""
        await self.outbox.start()
        self._later(self.policy.run())
        if not await self.policy.arrived(FIRST_POLICY_S):
            log.warning("no policy yet")
        rpc = self.runtime.serve(ALLOWED)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(self.core), rpc.server)
        await rpc.start([SERVICE_NAME])
        await self.http.start()
        self._serving = True
        if self.policy.usable:
            self.runtime.ready()
        if self.runtime.nats is not None:
            await self._listen(self.runtime.nats)
        self.runtime.announce(extra={"openai": self.http.address})

    async def stop(self) -> None:
        """No new requests; running ones may finish: a stream that was begun cannot move to another router."""
        self.runtime.ready(False)
        faces = [self.http.stop()]
        if self.runtime.rpc is not None:
            faces.append(self.runtime.rpc.stop(self.runtime.drain_s(self.options.drain_s)))
        await asyncio.gather(*faces)
        for task in tuple(self._tasks):
            task.cancel()
        await self.fleet.close()
        await self.encoders.close()
        await self.texts.close()
        self.core.grammars.close()
        await self.outbox.close()
        self.spans.close()

    def readiness(self) -> dict[str, Any]:
        """Ready: a decision can be made, and at least one model can be served."""
        serving = self.fleet.serving()
        reachable = sum(serving.values())
        return {
            "ready": self.policy.usable and (reachable > 0 or not serving),
            "policy": self.policy.usable,
            "models": reachable,
            "models_without_workers": len(serving) - reachable,
            "news": self.runtime.nats is not None and self.runtime.nats.connected,
            "usage_waiting": self.outbox.pending,
        }

    # What the parts ask of the mesh.

    def _dial(self, address: str, callee_role: str) -> grpc.aio.Channel:
        return open_channel(
            address, self.runtime.identity, callee_role=callee_role, tls=self.runtime.config.tls
        )

    def _kept_responses(self) -> KeptResponses | None:
        address = self.options.responses
        if not address:
            return None
        return KeptResponses(self.runtime.channel(address, "responses"), self.runtime.identity.mint)

    def _mint(self, claims: Mapping[str, Any]) -> str:
        return self.runtime.identity.mint(claims, audience="data", ttl_s=CAPABILITY_TTL_S)

    def _load_text(self, source: str) -> TextModel:
        return load_text_model(resolve(source, self.options.model_cache).path)

    async def _watch_policy(self, address: str, version: int) -> AsyncIterator[Snapshot]:
        channel = self._dial(address, "iam")
        try:
            call = iam_pb2_grpc.PolicyStub(channel).Watch(iam_pb2.WatchRequest(version=version))
            async for response in call:
                yield wire.snapshot(response)
        finally:
            await channel.close(None)

    async def _publish_usage(self, record: bytes, msg_id: str) -> bool:
        nats = self.runtime.nats
        return nats is not None and await nats.publish_usage(record, msg_id)

    def _suspect(self, worker: str, reason: str) -> None:
        if self.runtime.nats is not None:
            said = json.dumps({"by": self.runtime.config.name, "reason": reason}).encode()
            self._later(self._publish(self.runtime.nats, f"mesh.suspect.{worker}", said))

    @staticmethod
    async def _publish(nats: News, subject: str, data: bytes) -> None:
        await nats.publish(subject, data)

    # What the mesh tells.

    async def _listen(self, nats: News) -> None:
        await nats.watch_members(self._members_changed)
        await nats.subscribe_load(self._load_changed)
        await nats.subscribe("kv.events.>", self.fleet.on_blocks)
        await nats.subscribe("iam.policy", self._policy_hint)
        nats.on_connected(self.outbox.retry)

    def _members_changed(self, members: dict[str, Member]) -> None:
        self.fleet.on_members(members)
        self.encoders.on_members(members)

    def _load_changed(self, worker: str, load: Load) -> None:
        self.fleet.on_load(worker, LoadReport(load.running, load.waiting, load.free_pages))

    def _policy_hint(self, subject: str, data: bytes) -> None:
        self.policy.hint(int(data) if data.isdigit() else None)

    def _policy_arrived(self, snapshot: Snapshot) -> None:
        log.info("policy", extra={"version": snapshot.version, "models": len(snapshot.models)})
        if self._serving:
            self.runtime.ready()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(runtime: ServiceRuntime) -> None:
    """Until told to stop."""
    router = Router(runtime)
    await router.start()
    try:
        await runtime.stopping.wait()
    finally:
        await router.stop()


if __name__ == "__main__":
    main(serve)
