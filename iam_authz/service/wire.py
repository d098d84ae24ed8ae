"""Records to messages and back."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from kvmesh.v1 import iam_pb2

from iam_authz.directory import Snapshot
from iam_authz.records import ApiKey, CatalogueModel, Effect, Grant, Organisation, Usage
from mesh.errors import InvalidRequest

_EFFECTS = {Effect.ALLOW: iam_pb2.GRANT_EFFECT_ALLOW, Effect.DENY: iam_pb2.GRANT_EFFECT_DENY}
_EFFECTS_OF = {wire: effect for effect, wire in _EFFECTS.items()}
_LONGEST_ID = 256


def policy_message(snapshot: Snapshot) -> iam_pb2.WatchResponse:
    """The whole policy. Only routers may receive it: it holds the cache salts."""
    return iam_pb2.WatchResponse(
        version=snapshot.version,
        organisations=[
            iam_pb2.Organisation(id=o.id, suspended=o.suspended, cache_salt=o.cache_salt)
            for o in snapshot.organisations
        ],
        models=[model_message(model) for model in snapshot.models],
        grants=[grant_message(grant) for grant in snapshot.grants],
        revoked_credentials=snapshot.revoked,
    )


def organisation_message(organisation: Organisation) -> iam_pb2.Organisation:
    """Without the cache salt."""
    return iam_pb2.Organisation(id=organisation.id, suspended=organisation.suspended)


def model_message(model: CatalogueModel) -> iam_pb2.CatalogueModel:
    return iam_pb2.CatalogueModel(
        name=model.name, source=model.source, created=model.created, owned_by=model.owned_by
    )


def model_record(message: iam_pb2.CatalogueModel) -> CatalogueModel:
    return CatalogueModel(message.name, message.source, message.created, message.owned_by)


def grant_message(grant: Grant) -> iam_pb2.Grant:
    return iam_pb2.Grant(organisation=grant.organisation, model=grant.model, effect=_EFFECTS[grant.effect])


def grant_record(message: iam_pb2.Grant) -> Grant:
    """Raises InvalidRequest if it neither allows nor denies."""
    effect = _EFFECTS_OF.get(message.effect)
    if effect is None:
        raise InvalidRequest("A grant either allows or denies.", code="invalid_value", param="grant.effect")
    return Grant(message.organisation, message.model, effect)


def key_message(key: ApiKey) -> iam_pb2.Key:
    """Without the hash."""
    return iam_pb2.Key(
        id=key.id,
        organisation=key.organisation,
        name=key.name,
        created=key.created,
        expires=key.expires,
        revoked=key.revoked,
        last_used=key.last_used,
        models=key.models,
    )


def usage_message(usage: Usage) -> iam_pb2.UsageRecord:
    return iam_pb2.UsageRecord(
        request_id=usage.request_id,
        organisation=usage.organisation,
        credential=usage.credential,
        model_asked=usage.model_asked,
        model_served=usage.model_served,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        outcome=usage.outcome,
        finished_unix_ms=usage.finished_ms,
    )


def usage_record(data: bytes) -> Usage:
    """From a serialised `UsageRecord`. Raises ValueError if it cannot be one."""
    try:
        message = iam_pb2.UsageRecord.FromString(data)
    except DecodeError as error:
        raise ValueError("not a UsageRecord") from error
    texts = (message.request_id, message.organisation, message.credential, message.outcome)
    if not message.request_id or not message.organisation or max(map(len, texts)) > _LONGEST_ID:
        raise ValueError("no request id or organisation, or one that is too long")
    return Usage(
        request_id=message.request_id,
        organisation=message.organisation,
        credential=message.credential,
        model_asked=message.model_asked[:_LONGEST_ID],
        model_served=message.model_served[:_LONGEST_ID],
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        outcome=message.outcome,
        finished_ms=message.finished_unix_ms,
    )
