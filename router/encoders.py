"""Encode workers: who they are, and one call to the least busy of a model.

A call that a worker does not answer goes to another, once. They hold nothing of a request, so
there is nothing to place and nothing to move. Beside the wire module and the gRPC face this
is where protobuf is built and read. It does not know what is encoded.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from kvmesh.v1 import common_pb2, encode_pb2, encode_pb2_grpc

from mesh.errors import InternalError, Unavailable, from_rpc_error
from router.fleet import MemberNews
from router.sessions import Dial

# Hundreds of long texts take seconds; an encoder that hangs is not waited for.
EMBED_S = 60.0
TRIES = 2
Mint = Callable[[Mapping[str, Any]], str]


@dataclass(slots=True, eq=False)
class _Encoder:
    """`running` counts the calls of this router."""

    member: MemberNews
    channel: grpc.aio.Channel
    running: int = 0


class Encoders:
    """`mint(claims)` signs a capability."""

    def __init__(self, dial: Dial, mint: Mint) -> None:
        self._dial = dial
        self._mint = mint
        self._known: dict[str, _Encoder] = {}
        self._closing: list[grpc.aio.Channel] = []

    def on_members(self, members: Mapping[str, MemberNews]) -> None:
        """The members have changed."""
        encoders = {name: member for name, member in members.items() if member.role == "encode"}
        for name in set(self._known) - set(encoders):
            self._closing.append(self._known.pop(name).channel)
        for name, member in encoders.items():
            known = self._known.get(name)
            if known is not None and known.member.address == member.address:
                known.member = member
                continue
            if known is not None:
                self._closing.append(known.channel)
            self._known[name] = _Encoder(member, self._dial(member.address, "encode"))

    async def embed(
        self, model: str, prompts: Sequence[Sequence[int]], *, organisation: str, request_id: str
    ) -> list[array[float]]:
        """One vector for each. Raises Unavailable, Overloaded, InvalidRequest or InternalError."""
        request = encode_pb2.EncodeEmbedRequest(
            request_id=request_id,
            capability=self._mint({"org": organisation, "model": model, "request_id": request_id}),
            sequences=[common_pb2.TokenRun(ids=ids) for ids in prompts],
        )
        tried: list[_Encoder] = []
        while True:
            encoder = self._choose(model, tried)
            tried.append(encoder)
            encoder.running += 1
            try:
                answer = await encode_pb2_grpc.EncodeStub(encoder.channel).Embed(request, timeout=EMBED_S)
                return _vectors(answer, len(prompts))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or len(tried) >= TRIES:
                    raise from_rpc_error(error) from None
            finally:
                encoder.running -= 1

    async def close(self) -> None:
        for channel in [*self._closing, *(encoder.channel for encoder in self._known.values())]:
            await channel.close(None)
        self._known.clear()
        self._closing.clear()

    def _choose(self, model: str, tried: Sequence[_Encoder]) -> _Encoder:
        """One that is ready and was not tried, else one that was; raises Unavailable without any."""
        found = [e for e in self._known.values() if e.member.model == model and not e.member.draining]
        if not found:
            raise Unavailable(
                "No worker serves this model now. Try again.", code="no_worker", retry_after_s=2.0
            )
        return min(found, key=lambda e: (e in tried, not e.member.ready, e.running))


def _vectors(answer: encode_pb2.EncodeEmbedResponse, count: int) -> list[array[float]]:
    numbers = array("f")
    numbers.frombytes(answer.vectors)
    if sys.byteorder == "big":
        numbers.byteswap()
    size = answer.dimensions
    if not size or len(numbers) != count * size:
        raise InternalError("The worker's answer is not understood.")
    return [numbers[place * size : (place + 1) * size] for place in range(count)]
