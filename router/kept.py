"""Responses that clients asked to keep, at the service that keeps them.

Every call carries a capability for one organisation. Beside the wire module and the gRPC
face this is where protobuf is built and read. It does not know what a response says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import grpc.aio
from kvmesh.v1 import responses_pb2 as pb
from kvmesh.v1 import responses_pb2_grpc

from mesh.errors import MeshError, NotFound, RequestTooLarge, Unavailable, from_rpc_error

T = TypeVar("T")

AUDIENCE = "responses"
CALL_S = 10.0
CAPABILITY_S = 60.0
# All of a conversation that is continued.
CHAIN_BYTES_MAX = 64 << 20

Mint = Callable[..., str]


class KeptState(Enum):
    """Where a kept response is."""

    RUNNING = pb.RESPONSE_STATE_RUNNING
    ENDED = pb.RESPONSE_STATE_ENDED
    CANCELLED = pb.RESPONSE_STATE_CANCELLED
    LOST = pb.RESPONSE_STATE_LOST


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """`response` and `input_items` are JSON; `created` is in unix seconds."""

    id: str
    previous_id: str
    created: int
    response: bytes
    input_items: bytes
    state: KeptState = KeptState.ENDED
    background: bool = False


class KeptResponses:
    """`mint(claims, audience=, ttl_s=)` signs as this router."""

    def __init__(self, channel: grpc.aio.Channel, mint: Callable[..., str]) -> None:
        self._stub = responses_pb2_grpc.ResponsesStub(channel)
        self._mint = mint

    async def check(self, organisation: str) -> None:
        """Raises Unavailable if nothing could be kept now: better known before a generation than after it."""
        try:
            await self.get(organisation, "none")
        except NotFound:
            return

    async def put(self, organisation: str, kept: KeptResponse) -> None:
        """Raises Conflict, Overloaded, RequestTooLarge or Unavailable."""
        record = pb.StoredResponse(
            id=kept.id,
            previous_id=kept.previous_id,
            created_unix_s=kept.created,
            response=kept.response,
            input_items=kept.input_items,
            background=kept.background,
        )
        record.state = kept.state.value
        request = pb.PutRequest(capability=self._capability(organisation), record=record)
        await _told(self._stub.Put(request, timeout=CALL_S))

    async def get(self, organisation: str, response_id: str) -> KeptResponse:
        """Raises NotFound or Unavailable."""
        request = pb.GetRequest(capability=self._capability(organisation), id=response_id)
        return _kept((await _told(self._stub.Get(request, timeout=CALL_S))).record)

    async def chain(self, organisation: str, response_id: str) -> list[KeptResponse]:
        """The response and those before it, oldest first. Raises NotFound, RequestTooLarge, Unavailable."""
        request = pb.ChainRequest(capability=self._capability(organisation), id=response_id)
        records: list[KeptResponse] = []
        size = 0
        call = self._stub.Chain(request, timeout=CALL_S)
        try:
            async for answer in call:
                records.append(_kept(answer.record))
                size += len(answer.record.response) + len(answer.record.input_items)
                if size > CHAIN_BYTES_MAX:
                    call.cancel()
                    raise RequestTooLarge("The conversation is too long.", param="previous_response_id")
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        return records[::-1]

    async def delete(self, organisation: str, response_id: str) -> None:
        """Raises NotFound or Unavailable."""
        request = pb.DeleteRequest(capability=self._capability(organisation), id=response_id)
        await _told(self._stub.Delete(request, timeout=CALL_S))

    async def cancel(self, organisation: str, response_id: str) -> KeptResponse:
        """What is known of it then. Raises NotFound, InvalidRequest or Unavailable."""
        request = pb.CancelRequest(capability=self._capability(organisation), id=response_id)
        return _kept((await _told(self._stub.Cancel(request, timeout=CALL_S))).record)

    async def hold(self, organisation: str, response_id: str, held: Callable[[], None]) -> bool:
        """Works on a response as long as this runs, `held` from then on. True once it is cancelled.

        Raises MeshError when the hold is lost.
        """
        request = pb.HoldRequest(capability=self._capability(organisation), id=response_id)
        try:
            async for answer in self._stub.Hold(request):
                if answer.cancelled:
                    return True
                held()
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        raise Unavailable("The hold on the response has ended.")

    def _capability(self, organisation: str) -> str:
        claims: Mapping[str, Any] = {"org": organisation}
        return self._mint(claims, audience=AUDIENCE, ttl_s=CAPABILITY_S)


async def _told(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _error(error) from None


def _error(error: grpc.aio.AioRpcError) -> MeshError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        told = from_rpc_error(error)
        known = told.code not in (None, "unavailable", "deadline_exceeded")
        return (
            told
            if known
            else Unavailable("Kept responses cannot be reached now. Try again.", retry_after_s=1.0)
        )
    return from_rpc_error(error)


def _kept(record: pb.StoredResponse) -> KeptResponse:
    return KeptResponse(
        record.id,
        record.previous_id,
        record.created_unix_s,
        record.response,
        record.input_items,
        KeptState(record.state),
        record.background,
    )
