"""Between this worker's own data and the messages of the contract. Decides nothing."""

from __future__ import annotations

from kvmesh.v1 import common_pb2, decode_pb2

from decode.frames import (
    Beat,
    Done,
    Ending,
    Finish,
    Frame,
    Logprobs,
    Ready,
    Refusal,
    Refused,
    Reserved,
    Row,
    SourcesFailed,
    Step,
)
from decode.opening import Opening
from engine.sampling import SamplingParams
from mesh.errors import InvalidRequest, Unimplemented, detail

_FINISH = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_REFUSAL = {
    Refusal.NO_PAGES: decode_pb2.REFUSE_REASON_NO_PAGES,
    Refusal.BUSY: decode_pb2.REFUSE_REASON_BUSY,
    Refusal.DRAINING: decode_pb2.REFUSE_REASON_DRAINING,
    Refusal.INVALID: decode_pb2.REFUSE_REASON_INVALID,
    Refusal.NO_STORE: decode_pb2.REFUSE_REASON_NO_STORE,
}
_ENDING = {
    Ending.FINISHED: decode_pb2.DONE_REASON_FINISHED,
    Ending.CANCELLED: decode_pb2.DONE_REASON_CANCELLED,
    Ending.PREEMPTED: decode_pb2.DONE_REASON_PREEMPTED,
    Ending.FAILED: decode_pb2.DONE_REASON_FAILED,
    Ending.MOVED: decode_pb2.DONE_REASON_MOVED,
}


def opening(message: decode_pb2.Open) -> Opening:
    """Raises InvalidRequest or Unimplemented for what cannot be read as a request."""
    if not message.stop.HasField("max_tokens"):
        raise InvalidRequest("max_tokens is not set", param="max_tokens")
    if not message.handoff_id:
        raise InvalidRequest("the handoff has no id", param="handoff_id")
    return Opening(
        request_id=message.request_id,
        handoff_id=message.handoff_id,
        attempt=message.attempt,
        capability=message.capability,
        tokens=_tokens(message.prompt),
        generated=message.generated,
        block_ids=tuple(message.block_ids),
        root_id=message.root_id,
        n=message.n,
        first_choice=message.first_choice,
        sampling=_sampling(message.sampling),
        max_tokens=message.stop.max_tokens,
        min_tokens=message.stop.min_tokens,
        stop_ids=frozenset(message.stop.stop_token_ids),
        arrival_unix_ns=message.arrival_unix_ns,
        metadata=dict(message.metadata),
        credit=message.credit or None,
        traceparent=message.traceparent,
        grammar=message.grammar,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _tokens(prompt: common_pb2.Prompt) -> tuple[int, ...]:
    tokens: list[int] = []
    for segment in prompt.segments:
        if segment.WhichOneof("kind") != "tokens":
            raise Unimplemented("only token segments are served", param="prompt")
        tokens.extend(segment.tokens.ids)
    return tuple(tokens)


def _sampling(params: common_pb2.SamplingParams) -> SamplingParams:
    if not params.HasField("seed"):
        raise InvalidRequest("the seed is not set", param="seed")
    neutral = SamplingParams()
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else neutral.temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else neutral.top_p,
        min_p=params.min_p,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else neutral.repetition_penalty
        ),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def response(frame: Frame) -> decode_pb2.SessionResponse:
    match frame:
        case Step(rows):
            return decode_pb2.SessionResponse(step=decode_pb2.Step(rows=[_row(row) for row in rows]))
        case Beat(steps, running, waiting):
            beat = decode_pb2.Beat(steps=steps, running=running, waiting=waiting)
            return decode_pb2.SessionResponse(beat=beat)
        case Reserved(handoff_id, have, alone):
            reserved = decode_pb2.Reserved(handoff_id=handoff_id, have=have, alone=alone)
            return decode_pb2.SessionResponse(reserved=reserved)
        case Ready(handoff_id):
            return decode_pb2.SessionResponse(ready=decode_pb2.Ready(handoff_id=handoff_id))
        case SourcesFailed(handoff_id, attempt, error):
            failed = decode_pb2.SourcesFailed(
                handoff_id=handoff_id, attempt=attempt, message=error.message, error=detail(error)
            )
            return decode_pb2.SessionResponse(sources_failed=failed)
        case Refused():
            return decode_pb2.SessionResponse(refused=_refused(frame))
        case Done():
            return decode_pb2.SessionResponse(done=_done(frame))


def _refused(frame: Refused) -> decode_pb2.Refused:
    return decode_pb2.Refused(
        handoff_id=frame.handoff_id,
        reason=_REFUSAL[frame.reason],
        message=frame.error.message,
        error=detail(frame.error),
    )


def _done(frame: Done) -> decode_pb2.Done:
    message = decode_pb2.Done(
        handoff_id=frame.handoff_id,
        reason=_ENDING[frame.ending],
        computed_prompt_tokens=frame.computed_prompt_tokens,
    )
    if frame.error is not None:
        message.message = frame.error.message
        message.error.CopyFrom(detail(frame.error))
    return message


def _row(row: Row) -> decode_pb2.StepRow:
    message = decode_pb2.StepRow(
        handoff_id=row.handoff_id,
        choice=row.choice,
        token_ids=row.token_ids,
        logprobs=[_logprobs(position) for position in row.logprobs],
        stop_token_id=row.stop_token_id,
        prompt_logprobs=[_logprobs(position) for position in row.prompt_logprobs],
    )
    if row.finish is not None:
        message.finish_reason = _FINISH[row.finish]
    return message


def _logprobs(position: Logprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        logprob=position.logprob,
        top=[common_pb2.TokenLogprob(id=token, logprob=value) for token, value in position.top],
    )
