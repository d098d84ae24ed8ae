"""`kvmesh.v1.Inference`: the gRPC face over the same core.

The identity comes as metadata `x-mesh-identity`, which the edge sets; that the edge
speaks is the doorkeeper's rule. Leaving or cancelling the call stops the work at
once; gRPC's own flow control slows the worker down for a client that reads slowly.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio
from kvmesh.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from mesh.errors import InvalidRequest, MeshError
from mesh.telemetry import bind_request_id
from router.core.core import Admitted, Answer, Core
from router.core.exchange import CANCELLED, Exchange
from router.core.grammars import StructuredOutput
from router.core.request import Ask, Delta, Sampling, Scored, Stopping, Token, Usage
from router.core.texts import text_of
from router.openai.embeddings import check_dimensions, encoded, shortened
from text.grammar.forms import of_choice, of_grammar, of_regex, of_schema_text

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = "/kvmesh.v1.Inference/"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_START = re.compile(r"([0-9]{1,12})\.([0-9]{6})")
_FINISH = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}
_ROLES = frozenset({"system", "developer", "user", "assistant"})


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Every method opens an exchange, so that it is accounted for."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        exchange, identity = self._open("Generate", context)
        answer: Answer | None = None
        failure: BaseException | None = None
        with bind_request_id(exchange.request_id):
            try:
                answer = await self._start(request, exchange, identity)
                async for message in _messages(answer):
                    yield message
            except BaseException as error:
                failure = error
                raise
            finally:
                if answer is not None:
                    answer.close(failure)
                else:
                    _settle(exchange, failure)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        exchange, identity = self._open("Tokenize", context)
        failure: BaseException | None = None
        try:
            self._core.identify(exchange, identity)
            admitted = await self._core.admit(exchange, request.model)
            kind = request.WhichOneof("input")
            if kind == "chat":
                ids = await self._core.encode_chat(admitted, _chat(request.chat))
            elif kind == "text":
                special = request.add_special if request.HasField("add_special") else True
                ids = await self._core.encode(admitted, request.text, add_special=special)
            else:
                raise InvalidRequest("Missing required parameter: 'input'.", param="input")
            length = admitted.model.text.context_length
            return inference_pb2.TokenizeResponse(token_ids=ids, context_length=length)
        except BaseException as error:
            failure = error
            raise
        finally:
            _settle(exchange, failure, "ok")

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        exchange, identity = self._open("Detokenize", context)
        failure: BaseException | None = None
        try:
            self._core.identify(exchange, identity)
            admitted = await self._core.admit(exchange, request.model)
            text = text_of(admitted.model, request.token_ids, "token_ids")
            return inference_pb2.DetokenizeResponse(text=text)
        except BaseException as error:
            failure = error
            raise
        finally:
            _settle(exchange, failure, "ok")

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        exchange, identity = self._open("Embed", context)
        failure: BaseException | None = None
        try:
            self._core.identify(exchange, identity)
            admitted = await self._core.admit(exchange, request.model)
            if bool(request.texts) is bool(request.token_runs):
                raise InvalidRequest("Either 'texts' or 'token_runs' is needed.", param="texts")
            dimensions = request.dimensions if request.HasField("dimensions") else None
            check_dimensions(admitted, dimensions)
            inputs: list[str | list[int]] = [*request.texts, *(list(run.ids) for run in request.token_runs)]
            prompts = await encoded(self._core, admitted, inputs)
            vectors = await self._core.embed(admitted, prompts, param="texts")
            return inference_pb2.EmbedResponse(
                embeddings=[
                    inference_pb2.Embedding(values=shortened(vector, dimensions)) for vector in vectors
                ],
                usage=_usage(exchange.usage),
            )
        except BaseException as error:
            failure = error
            raise
        finally:
            _settle(exchange, failure, "ok")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        exchange, identity = self._open("ListModels", context)
        failure: BaseException | None = None
        try:
            self._core.identify(exchange, identity)
            cards = []
            for model in self._core.models(exchange):
                text = self._core.texts.loaded(model.name)
                cards.append(
                    inference_pb2.ModelCard(
                        id=model.name,
                        created=model.created,
                        owned_by=model.owned_by,
                        context_length=text.text.context_length if text is not None else 0,
                    )
                )
            return inference_pb2.ListModelsResponse(models=cards)
        except BaseException as error:
            failure = error
            raise
        finally:
            _settle(exchange, failure, "ok")

    def _open(self, method: str, context: Context) -> tuple[Exchange, str | None]:
        metadata = {
            key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        request_id = metadata.get("x-request-id", "")
        start = _START.fullmatch(metadata.get("x-mesh-start", ""))
        exchange = Exchange(
            self._core.books,
            SERVICE.strip("/") + "/" + method,
            request_id if _REQUEST_ID.fullmatch(request_id) else str(uuid.uuid4()),
            start_ns=int(start[1]) * 10**9 + int(start[2]) * 1000 if start else 0,
            traceparent=metadata.get("traceparent"),
        )
        return exchange, metadata.get("x-mesh-identity")

    async def _start(
        self, request: inference_pb2.GenerateRequest, exchange: Exchange, identity: str | None
    ) -> Answer:
        core = self._core
        core.identify(exchange, identity)
        admitted = await core.admit(exchange, request.model)
        ids = await self._prompt(request, admitted)
        ask = Ask(
            model=request.model,
            prompts=(ids,),
            n=request.n if request.HasField("n") else 1,
            sampling=_sampling(request.sampling),
            stopping=_stopping(request.stop),
            metadata=dict(request.metadata),
            grammar=await core.grammar(admitted, None, _structured(request)),
            prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        )
        return await core.start(admitted, ask)

    async def _prompt(self, request: inference_pb2.GenerateRequest, admitted: Admitted) -> list[int]:
        kind = request.WhichOneof("input")
        if kind == "text":
            return await self._core.encode(admitted, request.text)
        if kind == "chat":
            return await self._core.encode_chat(admitted, _chat(request.chat))
        if kind == "prompt":
            ids: list[int] = []
            for segment in request.prompt.segments:
                if segment.WhichOneof("kind") != "tokens":
                    raise InvalidRequest(
                        "Only segments of tokens are served.", code="unsupported_value", param="prompt"
                    )
                ids.extend(segment.tokens.ids)
            return ids
        raise InvalidRequest("Missing required parameter: 'input'.", param="input")


async def _messages(answer: Answer) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """One message per delta; the usage is on the last of all, which is held back for it."""
    held: inference_pb2.GenerateResponse | None = None
    while deltas := await answer.take():
        for delta in deltas:
            if held is not None:
                yield held
                held = None
            message = _message(delta)
            if delta.finish is None:
                yield message
            else:
                held = message
    if held is not None:
        held.usage.CopyFrom(_usage(answer.usage))
        yield held


def _message(delta: Delta) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        index=delta.index,
        text=delta.text,
        token_ids=[token.id for token in delta.tokens],
        logprobs=[_logprobs(token) for token in delta.tokens if token.logprob is not None],
        finish_reason=_FINISH.get(delta.finish or "", common_pb2.FINISH_REASON_UNSPECIFIED),
        prompt_logprobs=[_scored(position) for position in delta.prompt or ()],
    )


def _scored(position: Scored) -> common_pb2.PositionLogprobs:
    logprob, top = position
    return common_pb2.PositionLogprobs(
        logprob=logprob, top=[common_pb2.TokenLogprob(id=token, logprob=value) for token, value in top]
    )


def _logprobs(token: Token) -> common_pb2.PositionLogprobs:
    top = [common_pb2.TokenLogprob(id=other.id, logprob=other.logprob) for other in token.top]
    return common_pb2.PositionLogprobs(logprob=token.logprob or 0.0, top=top)


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _sampling(wire: common_pb2.SamplingParams) -> Sampling:
    given: Mapping[str, Any] = {
        field.name: value for field, value in wire.ListFields() if field.name != "logit_bias"
    }
    return Sampling(logit_bias=dict(wire.logit_bias), **given)


def _structured(request: inference_pb2.GenerateRequest) -> StructuredOutput | None:
    grammar = request.grammar
    kind = grammar.WhichOneof("kind")
    if kind is None:
        return None
    make: Callable[[], str]
    if kind == "choices":
        make = partial(of_choice, list(grammar.choices.texts))
    elif kind == "json_schema":
        make = partial(of_schema_text, grammar.json_schema)
    else:
        make = partial(of_regex if kind == "regex" else of_grammar, getattr(grammar, kind))
    return StructuredOutput("grammar", make)


def _stopping(wire: common_pb2.StopParams) -> Stopping:
    return Stopping(
        max_tokens=wire.max_tokens if wire.HasField("max_tokens") else None,
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids),
        stop=tuple(wire.stop),
        ignore_eos=wire.ignore_eos,
    )


def _chat(wire: inference_pb2.ChatMessages) -> list[dict[str, Any]]:
    if not wire.messages:
        raise InvalidRequest("Invalid 'chat': no messages.", code="empty_array", param="chat")
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(wire.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"Invalid value: 'chat.messages[{place}].role'. Supported are: {', '.join(sorted(_ROLES))}.",
                code="invalid_value",
                param=f"chat.messages[{place}].role",
            )
        read: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.HasField("name"):
            read["name"] = message.name
        messages.append(read)
    return messages


def _settle(exchange: Exchange, failure: BaseException | None, outcome: str = CANCELLED) -> None:
    if isinstance(failure, MeshError):
        exchange.settle(error=failure)
    elif failure is None:
        exchange.settle(outcome)
    else:
        exchange.settle(CANCELLED)
