"""The request core: who asks, may they, what exactly, and then the answer.

Both faces go through here and nothing else starts work. The order is fixed:
identity, decision, tokens, bounds, quota, work; nothing reaches a worker that could
still be refused. It does not know JSON, HTTP or protobuf.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from opentelemetry import trace

from mesh.errors import InternalError, InvalidRequest, MeshError
from router.core import phases as phase
from router.core.choice import Choice
from router.core.exchange import CANCELLED, Books, Exchange
from router.core.floor import Floor, Origin
from router.core.generation import Generation, first_error
from router.core.grammars import CallOutput, ModelGrammars, StructuredOutput
from router.core.identity import Verifier, verify_caller
from router.core.limits import check_sequences, checked
from router.core.outbox import Outbox
from router.core.policy import CatalogueModel, Organisation, decide, visible
from router.core.policy_watch import PolicyHolder
from router.core.quota import Quota, QuotaSlice
from router.core.request import NOTHING, Ask, Caller, ChatPrompt, Conversation, Delta, Usage
from router.core.texts import ServedModel, TextModels
from router.encoders import Encoders
from router.kept import KeptResponses


class Admitted:
    """A request whose caller may use its model."""

    def __init__(self, exchange: Exchange, organisation: Organisation, model: ServedModel) -> None:
        self.exchange = exchange
        self.organisation = organisation
        self.model = model


class Core:
    """One per router."""

    def __init__(
        self,
        *,
        verifier: Verifier,
        policy: PolicyHolder,
        texts: TextModels,
        floor: Floor,
        quota: Quota,
        books: Books,
        encoders: Encoders,
        kept: KeptResponses | None = None,
    ) -> None:
        self.books = books
        self.policy = policy
        self.texts = texts
        self.floor = floor
        self.grammars = ModelGrammars()
        self.encoders = encoders
        self.kept = kept
        self._verifier = verifier
        self._quota = quota

    def identify(self, exchange: Exchange, identity_token: str | None) -> Caller:
        """The caller; raises Unauthenticated or PermissionDenied."""
        exchange.caller = verify_caller(self._verifier, identity_token, exchange.request_id)
        return exchange.caller

    async def admit(self, exchange: Exchange, model: str) -> Admitted:
        """Decides; raises ModelNotFound for an unknown and for a forbidden model alike."""
        exchange.model_asked = model
        organisation, entry = decide(self.policy.current(), _caller(exchange), model)
        exchange.admitted(entry.name)
        exchange.phases.enter(phase.TOKENISE)
        return Admitted(exchange, organisation, await self.texts.get(entry))

    def models(self, exchange: Exchange) -> list[CatalogueModel]:
        """The models that the caller may use."""
        return visible(self.policy.current(), _caller(exchange))

    def model(self, exchange: Exchange, name: str) -> CatalogueModel:
        """One of them; raises ModelNotFound."""
        return decide(self.policy.current(), _caller(exchange), name)[1]

    async def encode(self, admitted: Admitted, text: str, *, add_special: bool = True) -> list[int]:
        return await self.texts.encode(admitted.model, text, add_special=add_special)

    async def encode_infill(self, admitted: Admitted, prefix: str | list[int], suffix: str) -> list[int]:
        return await self.texts.encode_infill(admitted.model, prefix, suffix)

    async def encode_chat(self, admitted: Admitted, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return await self.texts.encode_chat(admitted.model, messages)

    async def prompt_chat(self, admitted: Admitted, conversation: Conversation) -> ChatPrompt:
        """Renders and tokenises, and says how the answer is to be taken apart; raises InvalidRequest."""
        return await self.texts.prompt_chat(admitted.model, conversation)

    async def grammar(
        self,
        admitted: Admitted,
        prompt: ChatPrompt | None,
        text: StructuredOutput | None,
        calls: CallOutput | None = None,
    ) -> str:
        """What the answer to a prompt has to obey, "" for nothing; raises InvalidRequest."""
        return await self.grammars.make(
            admitted.organisation.id, admitted.model, prompt.form if prompt else None, text, calls
        )

    async def embed(
        self, admitted: Admitted, prompts: Sequence[Sequence[int]], *, param: str = "input"
    ) -> list[array[float]]:
        """One vector for each prompt, and the account of it. Raises InvalidRequest, Unavailable, ..."""
        model = admitted.model
        if model.text.dimensions is None:
            raise InvalidRequest("This model makes no embeddings.", code="unsupported_model", param="model")
        check_sequences(prompts, known_ids=model.known_ids, most=model.text.context_length, param=param)
        exchange = admitted.exchange
        tokens = sum(map(len, prompts))
        exchange.usage.prompt_tokens = tokens
        slice_ = await self._quota.lease(admitted.organisation.id, model.name, tokens)
        try:
            return await self.encoders.embed(
                model.name, prompts, organisation=admitted.organisation.id, request_id=exchange.request_id
            )
        finally:
            self._quota.settle(slice_, exchange.request_id, tokens)

    async def start(self, admitted: Admitted, ask: Ask, *, names: Mapping[str, str] = NOTHING) -> Answer:
        """Checks every bound, leases quota and begins. `names`: the face's words for fields."""
        model = admitted.model
        if model.text.dimensions is not None:
            raise InvalidRequest(
                "This model makes embeddings and no text. Use the embeddings endpoint.",
                code="unsupported_model",
                param="model",
            )
        ask = checked(ask, vocab_size=model.known_ids, context_length=model.text.context_length, names=names)
        if ask.grammar:
            await self.grammars.check(
                admitted.organisation.id, model, ask.grammar, names.get("grammar", "grammar")
            )
        exchange = admitted.exchange
        exchange.usage.prompt_tokens = sum(map(len, ask.prompts))
        most = exchange.usage.prompt_tokens + len(ask.prompts) * ask.n * (ask.stopping.max_tokens or 0)
        slice_ = await self._quota.lease(admitted.organisation.id, ask.model, most)
        return Answer(self.floor, self._quota, slice_, admitted, ask)


class Answer:
    """The choices of one request as they are generated.

    Iterate over it for lists of deltas; it ends when every choice has ended and
    raises the one error otherwise. `close` must be called, and cancels what still runs.
    """

    def __init__(self, floor: Floor, quota: Quota, slice_: QuotaSlice, admitted: Admitted, ask: Ask) -> None:
        self.choices = len(ask.prompts) * ask.n
        self._exchange = admitted.exchange
        self._quota = quota
        self._slice = slice_
        self._outbox = Outbox(self.choices, self._taken)
        self._last_at: dict[int, float] = {}
        self._n = ask.n
        self._generations = [
            self._generation(floor, admitted, ask, place, prompt) for place, prompt in enumerate(ask.prompts)
        ]
        self._task = asyncio.get_running_loop().create_task(
            self._work(), name=f"answer {self._exchange.request_id}"
        )

    @property
    def usage(self) -> Usage:
        """Counts so far; final at the end."""
        return self._exchange.usage

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while deltas := await self._outbox.take():
            yield deltas

    async def take(self) -> list[Delta]:
        """What is new; an empty list at the end. Raises the one error."""
        return await self._outbox.take()

    @property
    def outbox(self) -> Outbox:
        """For a face that waits for more than deltas."""
        return self._outbox

    def close(self, error: BaseException | None = None) -> None:
        """Settles the request: answered, failed with `error`, or left by its client."""
        self._task.cancel()
        exchange = self._exchange
        self._quota.settle(
            self._slice, exchange.request_id, exchange.usage.prompt_tokens + exchange.usage.completion_tokens
        )
        if isinstance(error, MeshError):
            exchange.settle(error=error)
        elif self._outbox.complete and error is None:
            exchange.settle()
        elif error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            exchange.settle(CANCELLED)
        else:
            exchange.settle(error=InternalError("internal error"))

    async def _work(self) -> None:
        try:
            with trace.use_span(
                self._exchange.span, end_on_exit=False, record_exception=False, set_status_on_exception=False
            ):
                if len(self._generations) == 1:
                    await self._generations[0].run()
                else:
                    await self._all()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._outbox.fail(error)

    async def _all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for generation in self._generations:
                    group.create_task(generation.run())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def _generation(
        self, floor: Floor, admitted: Admitted, ask: Ask, place: int, prompt: list[int]
    ) -> Generation:
        exchange, text = self._exchange, admitted.model.text
        choices = [
            Choice(place * ask.n + i, text.tokenizer, ask.stopping.stop, text.end_ids, ask.form)
            for i in range(ask.n)
        ]
        return Generation(
            floor,
            Origin(
                request_id=exchange.request_id,
                organisation=admitted.organisation.id,
                salt=admitted.organisation.salt,
                arrival_ns=exchange.arrival_ns,
                end_ids=text.end_ids,
                traceparent=exchange.traceparent,
            ),
            ask,
            prompt,
            choices,
            emit=self._emit,
            on_reserved=lambda cached: exchange.accepted(len(prompt), cached),
            # One request has one row of phases; its first prompt tells them.
            enter=exchange.phases.enter if place == 0 else _no_phase,
            on_placed_anew=exchange.placed_anew,
        )

    def _emit(self, delta: Delta) -> None:
        now = time.monotonic()
        last = self._last_at.get(delta.index)
        self._last_at[delta.index] = now
        self._exchange.generated(len(delta.tokens), None if last is None else now - last)
        self._exchange.usage.reasoning_tokens += delta.reasoning_tokens
        if delta.finish is not None:
            self._exchange.finish_reasons.append(delta.finish)
        self._outbox.put(delta)

    def _taken(self, index: int, tokens: int) -> None:
        self._generations[index // self._n].taken(index, tokens)


def _caller(exchange: Exchange) -> Caller:
    if exchange.caller is None:
        raise InternalError("the request has not been identified")
    return exchange.caller


def _no_phase(name: str) -> None:
    return None
