"""`kvmesh.v1.Prefill`: one call per run; its leases live exactly as long as the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvmesh.v1 import prefill_pb2, prefill_pb2_grpc
from opentelemetry.trace import Tracer

from engine import EngineInfo
from mesh.errors import PermissionDenied, Unavailable, Unimplemented
from mesh.identity import TokenVerifier
from mesh.telemetry.propagation import current_traceparent, parent_of
from mesh.telemetry.tracing import record_span
from prefill.loop import PrefillLoop, Ticket
from prefill.run import Order, check, check_chain

ALLOWED = {"/kvmesh.v1.Prefill/": frozenset({"router"})}
SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

# Longer prompts are hashed in a thread, so that the loop is not held up.
INLINE_TOKENS = 4096
# The router ends a run as soon as decode has its leases; this is for one that never does.
HOLD_S = 30.0


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """`model` is the name under which routers know what this worker computes."""

    def __init__(
        self, loop: PrefillLoop, info: EngineInfo, verifier: TokenVerifier, model: str, tracer: Tracer
    ) -> None:
        self.draining = False
        self._tracer = tracer
        self._loop = loop
        self._info = info
        self._verifier = verifier
        self._model = model

    async def Run(
        self, request: prefill_pb2.RunRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        if self.draining:
            raise Unavailable("the worker drains")
        order = _order(request)
        self._check_capability(order)
        await self._check(order)
        ticket = await self._loop.enter(order)
        try:
            async for response in _progress(ticket):
                yield response
            await asyncio.sleep(HOLD_S)
        finally:
            traced = current_traceparent()
            left = self._loop.leave(ticket)
            left.add_done_callback(lambda _: self._record(ticket, traced))

    def _record(self, ticket: Ticket, traceparent: str | None) -> None:
        """A span from the entry to the end of the last chunk."""
        parent, run = parent_of(traceparent), ticket.run
        if parent is not None and run.last_step_ns:
            told = {"computed_tokens": run.computed_tokens, "last_step_unix_ns": run.last_step_ns}
            record_span(
                self._tracer,
                "prefill.chunks",
                run.entered_ns,
                run.last_step_ns,
                parent=parent,
                attributes=told,
            )

    async def _check(self, order: Order) -> None:
        page_tokens = self._info.layout.page_tokens
        check(
            order,
            page_tokens=page_tokens,
            vocab_size=self._info.vocab_size,
            context_length=self._info.context_length,
        )
        if len(order.tokens) > INLINE_TOKENS:
            await asyncio.to_thread(check_chain, order, page_tokens)
        else:
            check_chain(order, page_tokens)

    def _check_capability(self, order: Order) -> None:
        """A router must have vouched for this handoff, this model and this chain of blocks."""
        claims = self._verifier.verify(order.capability, audience="data", roles={"router"}).claims
        expected = {"handoff": order.handoff_id, "model": self._model, "request_id": order.request_id}
        if order.block_ids:
            expected["last_block"] = order.block_ids[-1].hex()
        for name, value in expected.items():
            if claims.get(name) != value:
                raise PermissionDenied(f"the capability is for another {name.replace('_', ' ')}")


async def _progress(ticket: Ticket) -> AsyncIterator[prefill_pb2.RunResponse]:
    while (progress := await ticket.next()) is not None:
        yield prefill_pb2.RunResponse(
            committed_blocks=progress.committed_blocks,
            computed_tokens=progress.computed_tokens,
            queue_s=progress.queue_s,
        )


def _order(request: prefill_pb2.RunRequest) -> Order:
    if request.HasField("prompt_logprobs"):
        raise Unimplemented("log-probabilities of a prompt are not served yet", param="prompt_logprobs")
    tokens: list[int] = []
    for segment in request.prompt.segments:
        if segment.WhichOneof("kind") != "tokens":
            raise Unimplemented("only token segments are served", param="prompt")
        tokens.extend(segment.tokens.ids)
    return Order(
        request_id=request.request_id,
        handoff_id=request.handoff_id,
        attempt=request.attempt,
        capability=request.capability,
        tokens=tuple(tokens),
        block_ids=tuple(request.block_ids),
        root_id=request.root_id,
        have=getattr(request, "from"),
        arrival_unix_ns=request.arrival_unix_ns,
        reserves=request.reserves,
    )
