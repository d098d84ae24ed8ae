"""A decode worker, a prefill worker and an IAM that say what a test tells them, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from kvmesh.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    iam_pb2,
    iam_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

from mesh.blocks import chain
from mesh.errors import InternalError, MeshError, detail
from mesh.identity import TokenVerifier
from mesh.rpc import send_welcome

P = 16
END = 257

# Which tokens a request gets, by its prompt without what was generated, and its choice.
Script = Callable[[list[int], int], list[int]]


def echo(prompt: list[int], choice: int) -> list[int]:
    """The prompt once more, then the end token."""
    return [*[token for token in prompt if token < 256], END]


def endless(prompt: list[int], choice: int) -> list[int]:
    return [97] * 100_000


def score(prompt: list[int], alternatives: int) -> list[common_pb2.PositionLogprobs]:
    """One per token after the first: -id / 100, and alternatives that begin with the token itself."""
    return [
        common_pb2.PositionLogprobs(
            logprob=-token / 100,
            top=[
                common_pb2.TokenLogprob(id=token + i, logprob=-token / 100 - i) for i in range(alternatives)
            ],
        )
        for token in prompt[1:]
    ]


def text_script(text: str) -> Script:
    return lambda prompt, choice: [*text.encode(), END]


@dataclass
class Behaviour:
    """How the worker behaves; tests change it while it runs."""

    script: Script = echo
    tokens_per_step: Callable[[int], int] = lambda step: 1
    step_s: float = 0.0
    have: Callable[[decode_pb2.Open], int] = lambda open_: len(open_.block_ids)
    # Whether the store is away: "" not, "at once", or "later", after sources were named.
    alone: str = ""
    refuse: list[int] = field(default_factory=list)
    # After so many tokens of a handoff, once: "die", "hang", "preempt", "move" or "fail".
    incident: str = ""
    incident_after: int = 3
    logprobs: bool = False


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """Follows the frame protocol of decode.proto to the letter."""

    def __init__(self, verifier: TokenVerifier) -> None:
        self.behaviour = Behaviour()
        self.opened: list[decode_pb2.Open] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.credits: list[int] = []
        self.sources: list[decode_pb2.Sources] = []
        self.sent: dict[str, int] = {}
        self.generations: dict[str, asyncio.Task[None]] = {}
        self.sessions: list[asyncio.Task[Any]] = []
        self.news = asyncio.Condition()
        self._verifier = verifier
        self._sources: dict[str, asyncio.Future[None]] = {}
        self._credit: dict[str, int] = {}
        self._credited = asyncio.Event()
        self._closed: dict[str, set[int]] = {}

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self.generations.values())

    async def until(self, what: Callable[[], bool], timeout_s: float = 5) -> None:
        async with asyncio.timeout(timeout_s), self.news:
            await self.news.wait_for(what)

    async def tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        await send_welcome(context)
        task = asyncio.current_task()
        assert task is not None
        self.sessions.append(task)
        out: asyncio.Queue[decode_pb2.SessionResponse | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, out))
        beats = asyncio.create_task(self._beat(out))
        try:
            while (response := await out.get()) is not None:
                yield response
            await context.abort(grpc.StatusCode.UNAVAILABLE, "died")
        finally:
            reader.cancel()
            beats.cancel()
            self.sessions.remove(task)
            for generation in self.generations.values():
                generation.cancel()

    async def _beat(self, out: asyncio.Queue[Any]) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.running and self.behaviour.incident != "hung":
                out.put_nowait(
                    decode_pb2.SessionResponse(beat=decode_pb2.Beat(steps=1, running=self.running))
                )

    async def _read(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], out: asyncio.Queue[Any]
    ) -> None:
        async for request in requests:
            kind = request.WhichOneof("frame")
            if kind == "open":
                open_ = decode_pb2.Open()
                open_.CopyFrom(request.open)
                self.opened.append(open_)
                self._open(open_, out)
            elif kind == "sources":
                self.sources.append(request.sources)
                future = self._sources.get(request.sources.handoff_id)
                if future is not None and not future.done() and request.sources.WhichOneof("from") == "self":
                    future.set_result(None)
            elif kind == "cancel":
                choice = request.cancel.choice if request.cancel.HasField("choice") else None
                self.cancelled.append((request.cancel.handoff_id, choice))
                self._cancel(request.cancel.handoff_id, choice, out)
            elif kind == "credit":
                self.credits.append(request.credit.tokens)
                self._credit[request.credit.handoff_id] += request.credit.tokens
                self._credited.set()
            await self.tell()

    def committed(self, handoff_id: str) -> None:
        """A prefill worker has made the blocks of this handoff."""
        future = self._sources.get(handoff_id)
        if future is not None and not future.done():
            future.set_result(None)

    def _open(self, open_: decode_pb2.Open, out: asyncio.Queue[Any]) -> None:
        if self.behaviour.refuse:
            refused = decode_pb2.Refused(handoff_id=open_.handoff_id, message="no")
            refused.reason = self.behaviour.refuse.pop(0)  # type: ignore[assignment]
            if refused.reason == decode_pb2.REFUSE_REASON_INVALID:
                refused.error.CopyFrom(detail(InternalError("no", code="never")))
            out.put_nowait(decode_pb2.SessionResponse(refused=refused))
            return
        check_open(open_, self._verifier)
        self._sources[open_.handoff_id] = asyncio.get_running_loop().create_future()
        self._credit[open_.handoff_id] = open_.credit
        self._closed[open_.handoff_id] = set()
        task = asyncio.create_task(self._generate(open_, out))
        self.generations[open_.handoff_id] = task
        task.add_done_callback(lambda _: asyncio.ensure_future(self.tell()))

    def _cancel(self, handoff_id: str, choice: int | None, out: asyncio.Queue[Any]) -> None:
        task = self.generations.get(handoff_id)
        if task is None or task.done():
            return
        if choice is None:
            task.cancel()
            self._done(handoff_id, decode_pb2.DONE_REASON_CANCELLED, out)
        else:
            self._closed[handoff_id].add(choice)
            self._credited.set()

    def _done(
        self, handoff_id: str, reason: int, out: asyncio.Queue[Any], error: MeshError | None = None
    ) -> None:
        done = decode_pb2.Done(handoff_id=handoff_id, computed_prompt_tokens=1)
        done.reason = reason  # type: ignore[assignment]
        if error is not None:
            done.message = error.message
            done.error.CopyFrom(detail(error))
        out.put_nowait(decode_pb2.SessionResponse(done=done))

    async def _generate(self, open_: decode_pb2.Open, out: asyncio.Queue[Any]) -> None:
        behaviour, handoff_id = self.behaviour, open_.handoff_id
        have = min(behaviour.have(open_), len(open_.block_ids))
        reserved = decode_pb2.Reserved(handoff_id=handoff_id, have=have)
        if behaviour.alone != "at once":
            out.put_nowait(decode_pb2.SessionResponse(reserved=reserved))
        if behaviour.alone == "later":
            while not self.sources:  # noqa: ASYNC110 (of another service)
                await asyncio.sleep(0.01)
        if behaviour.alone:
            reserved.alone = True
            out.put_nowait(decode_pb2.SessionResponse(reserved=reserved))
        elif have < len(open_.block_ids):
            await self._sources[handoff_id]
        out.put_nowait(decode_pb2.SessionResponse(ready=decode_pb2.Ready(handoff_id=handoff_id)))
        ids = list(open_.prompt.segments[0].tokens.ids)
        prompt = ids[: len(ids) - open_.generated]
        left = {
            choice: behaviour.script(prompt, choice)[open_.generated : open_.stop.max_tokens]
            for choice in range(open_.first_choice, open_.first_choice + open_.n)
        }
        step = sent = 0
        while any(left.values()):
            count = behaviour.tokens_per_step(step)
            step += 1
            if behaviour.step_s:
                await asyncio.sleep(behaviour.step_s)
            while open_.credit and sent + count > self._credit[handoff_id]:
                self._credited.clear()
                await self._credited.wait()
            rows = [self._row(open_, choice, left, count) for choice in left if left[choice]]
            if step == 1 and open_.HasField("prompt_logprobs"):
                for row in rows:
                    row.prompt_logprobs.extend(score(prompt, open_.prompt_logprobs))
            out.put_nowait(decode_pb2.SessionResponse(step=decode_pb2.Step(rows=rows)))
            sent += count
            self.sent[handoff_id] = sent
            if behaviour.incident not in ("", "hung") and sent >= behaviour.incident_after:
                await self._incident(handoff_id, out)
                return
            for choice in self._closed[handoff_id]:
                left[choice] = []
            await asyncio.sleep(0)
        self._done(handoff_id, decode_pb2.DONE_REASON_FINISHED, out)

    def _row(
        self, open_: decode_pb2.Open, choice: int, left: dict[int, list[int]], count: int
    ) -> decode_pb2.StepRow:
        tokens, left[choice] = left[choice][:count], left[choice][count:]
        stops = set(open_.stop.stop_token_ids)
        row = decode_pb2.StepRow(handoff_id=open_.handoff_id, choice=choice)
        for token in tokens:
            row.token_ids.append(token)
            if token in stops:
                row.finish_reason = common_pb2.FINISH_REASON_STOP
                row.stop_token_id = token
                left[choice] = []
                break
        if not left[choice] and not row.finish_reason:
            row.finish_reason = common_pb2.FINISH_REASON_LENGTH
        if open_.sampling.HasField("logprobs"):
            for token in row.token_ids:
                top = [
                    common_pb2.TokenLogprob(id=i, logprob=-1.0 - i) for i in range(open_.sampling.logprobs)
                ]
                row.logprobs.append(common_pb2.PositionLogprobs(logprob=-0.5 - token / 1000, top=top))
        return row

    async def _incident(self, handoff_id: str, out: asyncio.Queue[Any]) -> None:
        incident, self.behaviour.incident = self.behaviour.incident, ""
        if incident == "die":
            out.put_nowait(None)
        elif incident == "hang":
            self.behaviour.incident = "hung"
            await asyncio.Event().wait()
        elif incident == "preempt":
            self._done(handoff_id, decode_pb2.DONE_REASON_PREEMPTED, out)
        elif incident == "move":
            self._done(handoff_id, decode_pb2.DONE_REASON_MOVED, out)
        elif incident == "fail":
            self._done(handoff_id, decode_pb2.DONE_REASON_FAILED, out, InternalError("the step failed"))


def check_open(open_: decode_pb2.Open, verifier: TokenVerifier) -> None:
    """What a real worker would insist on."""
    ids = list(open_.prompt.segments[0].tokens.ids)
    whole = (len(ids) - 1) // P
    assert list(open_.block_ids) == chain(open_.root_id, ids[: whole * P])
    claims = verifier.verify(open_.capability, audience="data", roles={"router"}).claims
    assert claims["handoff"] == open_.handoff_id
    assert claims["request_id"] == open_.request_id
    assert claims["org"]
    assert claims["last_block"] == (open_.block_ids[-1].hex() if whole else "")
    assert open_.sampling.HasField("seed")
    assert open_.stop.max_tokens > open_.generated
    assert not open_.stop.stop
    assert open_.n == 1 or open_.generated == 0


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """Commits every block and keeps the call open, as a real one does. `fault` says otherwise, once."""

    def __init__(self, decoders: Sequence[FakeDecode]) -> None:
        self.runs: list[prefill_pb2.RunRequest] = []
        self.open_runs = 0
        self.fault = ""
        self._decoders = decoders

    async def Run(
        self, request: prefill_pb2.RunRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        run = prefill_pb2.RunRequest()
        run.CopyFrom(request)
        self.runs.append(run)
        fault, self.fault = self.fault, ""
        self.open_runs += 1
        try:
            if fault == "die":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "died")
            if fault == "stall":
                yield prefill_pb2.RunResponse(committed_blocks=0, queue_s=0.0)
                await asyncio.Event().wait()
            yield prefill_pb2.RunResponse(committed_blocks=len(run.block_ids), computed_tokens=P)
            for decode in self._decoders:
                decode.committed(run.handoff_id)
            await asyncio.Event().wait()
        finally:
            self.open_runs -= 1


class FakeIam(iam_pb2_grpc.PolicyServicer):
    """Streams the policy it is given, again whenever that changes."""

    def __init__(self, policy: iam_pb2.WatchResponse) -> None:
        self.policy = policy
        self.streams: list[asyncio.Task[Any]] = []
        self._changed = asyncio.Event()

    def put(self, policy: iam_pb2.WatchResponse) -> None:
        self.policy = policy
        self._changed.set()

    async def Watch(
        self, request: iam_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[iam_pb2.WatchResponse]:
        while True:
            self._changed.clear()
            yield self.policy
            await self._changed.wait()
