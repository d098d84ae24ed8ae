"""`kvmesh.v1.Encode`. Protobuf comes no further than this file."""

from __future__ import annotations

from typing import Any

from kvmesh.v1 import encode_pb2, encode_pb2_grpc

from encode.batches import Batches
from encode.bert import Bert
from mesh.errors import InvalidRequest, PermissionDenied, Unavailable
from mesh.identity import TokenVerifier

SERVICE_NAME = encode_pb2.DESCRIPTOR.services_by_name["Encode"].full_name
ALLOWED = {f"/{SERVICE_NAME}/": frozenset({"router"})}


class EncodeService(encode_pb2_grpc.EncodeServicer):
    """`model` is the name under which routers know what this worker computes."""

    def __init__(self, batches: Batches, model: Bert, verifier: TokenVerifier, name: str) -> None:
        self.draining = False
        self._batches = batches
        self._model = model
        self._verifier = verifier
        self._name = name

    async def Embed(
        self, request: encode_pb2.EncodeEmbedRequest, context: Any
    ) -> encode_pb2.EncodeEmbedResponse:
        if self.draining:
            raise Unavailable("the worker drains")
        claims = self._verifier.verify(request.capability, audience="data", roles={"router"}).claims
        for name, value in (("model", self._name), ("request_id", request.request_id)):
            if claims.get(name) != value:
                raise PermissionDenied(f"the capability is for another {name.replace('_', ' ')}")
        sequences = [list(run.ids) for run in request.sequences]
        self._check(sequences)
        vectors = await self._batches.embed(sequences)
        return encode_pb2.EncodeEmbedResponse(
            dimensions=vectors.shape[1], vectors=vectors.astype("<f4").tobytes()
        )

    def _check(self, sequences: list[list[int]]) -> None:
        if not sequences:
            raise InvalidRequest("there is no sequence to encode", param="sequences")
        for ids in sequences:
            if not 1 <= len(ids) <= self._model.context_length:
                raise InvalidRequest(
                    f"a sequence of {len(ids)} tokens; the model reads 1 to {self._model.context_length}",
                    param="sequences",
                )
            if max(ids) >= self._model.vocab_size:
                raise InvalidRequest(f"a token id is not below {self._model.vocab_size}", param="sequences")
