"""`kvmesh.v1.Decode`: one session per router, in which every request is checked for its capability."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvmesh.v1 import decode_pb2, decode_pb2_grpc

from decode import wire
from decode.admission import Admission
from decode.frames import Refusal, Refused
from decode.opening import Opening
from decode.session import RouterSession
from mesh.errors import InternalError, MeshError, PermissionDenied
from mesh.identity import TokenVerifier
from mesh.rpc import caller, send_welcome

ALLOWED = {"/kvmesh.v1.Decode/": frozenset({"router"})}
SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name

log = logging.getLogger(__name__)


class CapabilityCheck:
    """Whether a router has vouched for a request: this handoff, this model, this chain of blocks."""

    def __init__(self, verifier: TokenVerifier, model: str) -> None:
        self._verifier = verifier
        self._model = model

    def __call__(self, opening: Opening) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        claims = self._verifier.verify(opening.capability, audience="data", roles={"router"}).claims
        expected = {
            "handoff": opening.handoff_id,
            "model": self._model,
            "request_id": opening.request_id,
        }
        if opening.block_ids:
            expected["last_block"] = opening.block_ids[-1].hex()
        for name, value in expected.items():
            if claims.get(name) != value:
                raise PermissionDenied(f"the capability is for another {name.replace('_', ' ')}")


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Turns frames into calls of `Admission` and back."""

    def __init__(self, admission: Admission, wake: Callable[[], None]) -> None:
        self._admission = admission
        self._wake = wake
        self._sessions: set[RouterSession] = set()

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        session = RouterSession(caller(context).name, self._wake)
        # The router waits for this before it takes the worker for connected.
        await send_welcome(context)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            async for frame in session.frames():
                yield wire.response(frame)
        finally:
            self._sessions.discard(session)
            session.close()
            self._admission.leave(session)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def close(self) -> None:
        """Ends every session after what is queued in it."""
        for session in self._sessions:
            session.close()

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest], session: RouterSession) -> None:
        try:
            async for request in requests:
                self._frame(request, session)
        except Exception:
            # However the stream broke, the requests in it are cancelled.
            log.info("the session of %s broke", session.router)
        finally:
            session.close()

    def _frame(self, request: decode_pb2.SessionRequest, session: RouterSession) -> None:
        match request.WhichOneof("frame"):
            case "open":
                self._open(request.open, session)
            case "sources":
                sources = request.sources
                itself = sources.WhichOneof("from") == "self"
                self._admission.sources(
                    session,
                    sources.handoff_id,
                    sources.attempt,
                    itself=itself,
                    pull_address=sources.pull_address,
                )
            case "cancel":
                cancel = request.cancel
                choice = cancel.choice if cancel.HasField("choice") else None
                self._admission.cancel(session, cancel.handoff_id, choice)
            case "credit":
                self._admission.credit(session, request.credit.handoff_id, request.credit.tokens)
            case _:
                log.warning("a frame of an unknown kind from %s", session.router)

    def _open(self, message: decode_pb2.Open, session: RouterSession) -> None:
        error: MeshError
        try:
            self._admission.open(wire.opening(message), session)
            return
        except MeshError as refused:
            error = refused
        except Exception:
            log.exception("request %s could not be opened", message.request_id)
            error = InternalError("the request could not be opened")
        session.send(Refused(message.handoff_id, Refusal.INVALID, error))
