"""Between the router's own data and the messages of the contract.

The only place, beside the gRPC face, that builds or reads protobuf. It decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.v1 import common_pb2, decode_pb2, iam_pb2, prefill_pb2

from mesh.errors import InternalError, MeshError, from_detail
from router.core.choice import Row
from router.core.policy import CatalogueModel, Organisation, Snapshot
from router.core.request import Sampling, Scored

_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
_REFUSALS = {
    decode_pb2.REFUSE_REASON_NO_PAGES: "no_pages",
    decode_pb2.REFUSE_REASON_BUSY: "busy",
    decode_pb2.REFUSE_REASON_DRAINING: "draining",
    decode_pb2.REFUSE_REASON_NO_STORE: "no_store",
}
_ENDINGS = {
    decode_pb2.DONE_REASON_FINISHED: "finished",
    decode_pb2.DONE_REASON_CANCELLED: "cancelled",
    decode_pb2.DONE_REASON_PREEMPTED: "preempted",
    decode_pb2.DONE_REASON_MOVED: "moved",
}


@dataclass(frozen=True, slots=True)
class Opening:
    """What a decode worker is asked. `stop_ids` is the complete list."""

    request_id: str
    handoff_id: str
    attempt: int
    capability: str
    tokens: Sequence[int]
    generated: int
    block_ids: Sequence[bytes]
    root_id: bytes
    n: int
    first_choice: int
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    stop_ids: Sequence[int]
    ignore_eos: bool
    arrival_ns: int
    credit: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    grammar: str = ""
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """`alone`: the worker computes what is missing itself, its store is away."""

    handoff_id: str
    have: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """`reason` is no_pages, busy, draining, no_store or invalid."""

    handoff_id: str
    reason: str
    error: MeshError


@dataclass(frozen=True, slots=True)
class Ready:
    handoff_id: str


@dataclass(frozen=True, slots=True)
class SourcesFailed:
    """The sources of an attempt will not deliver."""

    handoff_id: str
    attempt: int
    error: MeshError


@dataclass(frozen=True, slots=True)
class Step:
    """Rows by handoff."""

    rows: Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Done:
    """`ending` is finished, cancelled, preempted, moved or failed."""

    handoff_id: str
    ending: str
    error: MeshError | None
    computed_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Beat:
    steps: int
    running: int
    waiting: int


Frame = Reserved | Refused | Ready | SourcesFailed | Step | Done | Beat


def prompt(tokens: Sequence[int]) -> common_pb2.Prompt:
    return common_pb2.Prompt(segments=[common_pb2.Segment(tokens=common_pb2.TokenRun(ids=tokens))])


def sampling_params(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        logprobs=sampling.logprobs,
    )


def open_frame(opening: Opening) -> decode_pb2.SessionRequest:
    return decode_pb2.SessionRequest(
        open=decode_pb2.Open(
            request_id=opening.request_id,
            handoff_id=opening.handoff_id,
            attempt=opening.attempt,
            capability=opening.capability,
            prompt=prompt(opening.tokens),
            generated=opening.generated,
            block_ids=list(opening.block_ids),
            root_id=opening.root_id,
            n=opening.n,
            sampling=sampling_params(opening.sampling),
            stop=common_pb2.StopParams(
                max_tokens=opening.max_tokens,
                min_tokens=opening.min_tokens,
                stop_token_ids=opening.stop_ids,
                ignore_eos=opening.ignore_eos,
            ),
            arrival_unix_ns=opening.arrival_ns,
            metadata=dict(opening.metadata),
            first_choice=opening.first_choice,
            credit=opening.credit,
            traceparent=opening.traceparent,
            grammar=opening.grammar,
            prompt_logprobs=opening.prompt_logprobs,
        )
    )


@dataclass(frozen=True, slots=True)
class Sources:
    """Where missing blocks come from: a prefill worker of the decode worker's node, or the
    store of another node. Neither: the decode worker itself."""

    prefill_worker: str = ""
    pull_address: str = ""


def sources_frame(handoff_id: str, attempt: int, sources: Sources) -> decode_pb2.SessionRequest:
    message = decode_pb2.Sources(handoff_id=handoff_id, attempt=attempt)
    if sources.pull_address:
        message.pull_address = sources.pull_address
    elif sources.prefill_worker:
        message.prefill_worker = sources.prefill_worker
    else:
        message.self = True
    return decode_pb2.SessionRequest(sources=message)


def cancel_frame(handoff_id: str, choice: int | None = None) -> decode_pb2.SessionRequest:
    return decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handoff_id=handoff_id, choice=choice))


def credit_frame(handoff_id: str, tokens: int) -> decode_pb2.SessionRequest:
    return decode_pb2.SessionRequest(credit=decode_pb2.Credit(handoff_id=handoff_id, tokens=tokens))


def run_request(
    opening: Opening, attempt: int, have: int, page_tokens: int, *, reserves: bool = False
) -> prefill_pb2.RunRequest:
    """The whole blocks of the prompt, for a prefill worker; `reserves` for one on another node."""
    request = prefill_pb2.RunRequest(
        request_id=opening.request_id,
        handoff_id=opening.handoff_id,
        attempt=attempt,
        capability=opening.capability,
        prompt=prompt(opening.tokens[: len(opening.block_ids) * page_tokens]),
        block_ids=list(opening.block_ids),
        arrival_unix_ns=opening.arrival_ns,
        root_id=opening.root_id,
        reserves=reserves,
    )
    setattr(request, "from", have)
    return request


def frame(response: decode_pb2.SessionResponse) -> Frame | None:
    """A frame of a decode worker; None for a kind that this router does not know."""
    kind = response.WhichOneof("frame")
    if kind == "step":
        return _step(response.step)
    if kind == "beat":
        return Beat(response.beat.steps, response.beat.running, response.beat.waiting)
    if kind == "reserved":
        reserved = response.reserved
        return Reserved(reserved.handoff_id, reserved.have, reserved.alone)
    if kind == "ready":
        return Ready(response.ready.handoff_id)
    if kind == "refused":
        refused = response.refused
        reason = _REFUSALS.get(refused.reason, "invalid")
        return Refused(refused.handoff_id, reason, _error(refused, refused.message))
    if kind == "sources_failed":
        failed = response.sources_failed
        return SourcesFailed(failed.handoff_id, failed.attempt, _error(failed, failed.message))
    if kind == "done":
        done = response.done
        ending = _ENDINGS.get(done.reason, "failed")
        error = _error(done, done.message) if ending == "failed" else None
        return Done(done.handoff_id, ending, error, done.computed_prompt_tokens)
    return None


def _model(model: iam_pb2.CatalogueModel) -> CatalogueModel:
    return CatalogueModel(model.name, model.source, model.created, model.owned_by or "kvmesh")


def _step(step: decode_pb2.Step) -> Step:
    rows: dict[str, list[Row]] = {}
    for row in step.rows:
        rows.setdefault(row.handoff_id, []).append(
            Row(
                choice=row.choice,
                tokens=tuple(row.token_ids),
                logprobs=_scored(row.logprobs) if row.logprobs else (),
                finish=_FINISH.get(row.finish_reason),
                stop_token=row.stop_token_id if row.HasField("stop_token_id") else None,
                prompt_logprobs=_scored(row.prompt_logprobs) if row.prompt_logprobs else None,
            )
        )
    return Step(rows)


def _scored(positions: Iterable[common_pb2.PositionLogprobs]) -> tuple[Scored, ...]:
    return tuple(
        (position.logprob, tuple((other.id, other.logprob) for other in position.top))
        for position in positions
    )


def _error(
    carrier: decode_pb2.Refused | decode_pb2.Done | decode_pb2.SourcesFailed, message: str
) -> MeshError:
    if carrier.HasField("error"):
        return from_detail(carrier.error, message)
    return InternalError("The worker failed on this request.")


def snapshot(response: iam_pb2.WatchResponse) -> Snapshot:
    """A policy snapshot as the core holds it."""
    allowed: dict[str, set[str]] = {}
    denied: dict[str, set[str]] = {}
    for grant in response.grants:
        # Anything that is not an allowance is a denial.
        effects = allowed if grant.effect == iam_pb2.GRANT_EFFECT_ALLOW else denied
        effects.setdefault(grant.organisation, set()).add(grant.model)
    return Snapshot(
        version=response.version,
        organisations={o.id: Organisation(o.id, o.suspended, o.cache_salt) for o in response.organisations},
        models={
            m.name: CatalogueModel(m.name, m.source, m.created, m.owned_by or "kvmesh")
            for m in response.models
        },
        allowed={name: frozenset(models) for name, models in allowed.items()},
        denied={name: frozenset(models) for name, models in denied.items()},
        revoked=frozenset(response.revoked_credentials),
    )
