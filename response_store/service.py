"""`kvmesh.v1.Responses`. Protobuf comes no further than this file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvmesh.v1 import responses_pb2 as pb
from kvmesh.v1 import responses_pb2_grpc

from mesh.errors import Conflict, InvalidRequest, NotFound, PermissionDenied
from mesh.identity import TokenVerifier
from response_store.holds import Holds
from response_store.record import Record, State
from response_store.shelf import Shelf

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Responses"].full_name
ALLOWED = {f"/{SERVICE_NAME}/": frozenset({"router"})}
AUDIENCE = "responses"
_ID_MAX = 128


class ResponsesService(responses_pb2_grpc.ResponsesServicer):
    """The organisation is the capability's, never one that a message names."""

    def __init__(self, shelf: Shelf, verifier: TokenVerifier) -> None:
        self._shelf = shelf
        self._verifier = verifier
        self._holds = Holds()

    async def Put(self, request: pb.PutRequest, context: Any) -> pb.PutResponse:
        organisation = self._organisation(request.capability)
        await self._shelf.put(organisation, _record(request.record))
        return pb.PutResponse()

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        record = await self._shelf.get(self._organisation(request.capability), request.id)
        return pb.GetResponse(record=_message(record))

    async def Chain(self, request: pb.ChainRequest, context: Any) -> AsyncIterator[pb.ChainResponse]:
        for record in await self._shelf.chain(self._organisation(request.capability), request.id):
            yield pb.ChainResponse(record=_message(record))

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        await self._shelf.delete(self._organisation(request.capability), request.id)
        self._holds.cancel(request.id)
        return pb.DeleteResponse()

    async def Hold(self, request: pb.HoldRequest, context: Any) -> AsyncIterator[pb.HoldResponse]:
        organisation = self._organisation(request.capability)
        record = await self._shelf.get(organisation, request.id)
        cancelled = self._holds.take(request.id) if record.state is State.RUNNING else None
        if cancelled is None:
            raise Conflict("Nobody may take up this response now.")
        try:
            yield pb.HoldResponse()
            await cancelled.wait()
            yield pb.HoldResponse(cancelled=True)
        finally:
            self._holds.drop(request.id)
            await self._lost(organisation, request.id)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        organisation = self._organisation(request.capability)
        record = await self._shelf.get(organisation, request.id)
        if not record.background:
            raise InvalidRequest("Cannot cancel a synchronous response.", code="invalid_request")
        record = await self._shelf.end(organisation, request.id, State.CANCELLED)
        self._holds.cancel(request.id)
        return pb.CancelResponse(record=_message(record))

    async def _lost(self, organisation: str, response_id: str) -> None:
        """A response that its holder leaves before it has ended will never end."""
        try:
            await self._shelf.end(organisation, response_id, State.LOST)
        except NotFound:
            return

    def _organisation(self, capability: str) -> str:
        """Whose responses a router may touch; raises Unauthenticated or PermissionDenied."""
        claims = self._verifier.verify(capability, audience=AUDIENCE, roles={"router"}).claims
        organisation = claims.get("org")
        if not isinstance(organisation, str) or not organisation:
            raise PermissionDenied("The capability names no organisation.")
        return organisation


def _record(message: pb.StoredResponse) -> Record:
    if not 1 <= len(message.id) <= _ID_MAX or len(message.previous_id) > _ID_MAX:
        raise InvalidRequest(f"An id has 1 to {_ID_MAX} characters.", param="id")
    if message.state not in (pb.RESPONSE_STATE_RUNNING, pb.RESPONSE_STATE_ENDED):
        raise InvalidRequest("A response that is put runs or has ended.", param="state")
    return Record(
        message.id,
        message.previous_id,
        message.created_unix_s,
        State(message.state),
        message.response,
        message.input_items,
        message.background,
    )


def _message(record: Record) -> pb.StoredResponse:
    message = pb.StoredResponse(
        id=record.id,
        previous_id=record.previous_id,
        created_unix_s=record.created,
        response=record.response,
        input_items=record.input_items,
        background=record.background,
    )
    message.state = int(record.state)  # type: ignore[assignment]
    return message
