"""The errors that a service gives on purpose, and how they cross a process.

    MeshError
    ├── InvalidRequest        ├── RateLimited
    ├── Unauthenticated       ├── OutOfPages
    ├── PermissionDenied      ├── Overloaded
    ├── NotFound              ├── Unavailable
    │   └── ModelNotFound     ├── DeadlineExceeded
    ├── Conflict              ├── Cancelled
    │   ├── StaleHandle       ├── Unimplemented
    │   └── StaleAttempt      └── InternalError
    └── RequestTooLarge

| error            | gRPC status         | HTTP | OpenAI type           | code                 |
|------------------|---------------------|------|-----------------------|----------------------|
| InvalidRequest   | INVALID_ARGUMENT    | 400  | invalid_request_error | null                 |
| Unauthenticated  | UNAUTHENTICATED     | 401  | authentication_error  | invalid_api_key      |
| PermissionDenied | PERMISSION_DENIED   | 403  | permission_error      | permission_denied    |
| NotFound         | NOT_FOUND           | 404  | invalid_request_error | not_found            |
| ModelNotFound    | NOT_FOUND           | 404  | invalid_request_error | model_not_found      |
| Conflict         | ABORTED             | 409  | conflict_error        | conflict             |
| StaleHandle      | FAILED_PRECONDITION | 409  | conflict_error        | stale_handle         |
| StaleAttempt     | FAILED_PRECONDITION | 409  | conflict_error        | stale_attempt        |
| RequestTooLarge  | OUT_OF_RANGE        | 413  | invalid_request_error | request_too_large    |
| RateLimited      | RESOURCE_EXHAUSTED  | 429  | rate_limit_error      | rate_limit_exceeded  |
| OutOfPages       | RESOURCE_EXHAUSTED  | 503  | server_error          | out_of_pages         |
| Overloaded       | UNAVAILABLE         | 503  | server_error          | overloaded           |
| Unavailable      | UNAVAILABLE         | 503  | server_error          | unavailable          |
| DeadlineExceeded | DEADLINE_EXCEEDED   | 504  | server_error          | deadline_exceeded    |
| Cancelled        | CANCELLED           | 499  | server_error          | cancelled            |
| Unimplemented    | UNIMPLEMENTED       | 400  | invalid_request_error | unsupported          |
| InternalError    | INTERNAL            | 500  | server_error          | internal_error       |

Code, parameter, HTTP status and retry-after travel as `kvmesh.v1.ErrorDetail`
inside a `google.rpc.Status` in the trailing metadata of the call. This module
does not know who raises what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from kvmesh.v1 import common_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"


class MeshError(Exception):
    """An error with a reason that the caller may read.

    `code` is a stable word, `param` the request field at fault, `retry_after_s`
    how long the caller should wait before it tries again.
    """

    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.default_code
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(MeshError):
    """The request is wrong and stays wrong."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"


class Unauthenticated(MeshError):
    """Nobody vouches for the caller."""

    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDenied(MeshError):
    """The caller is known and may not do this."""

    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "permission_error"
    default_code = "permission_denied"


class NotFound(MeshError):
    """There is no such thing, or none that the caller may see."""

    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFound(NotFound):
    """An unknown model and a forbidden one: the caller cannot tell them apart."""

    default_code = "model_not_found"


class Conflict(MeshError):
    """The state has moved on; the caller should look again."""

    grpc_status = grpc.StatusCode.ABORTED
    http_status = 409
    openai_type = "conflict_error"
    default_code = "conflict"


class StaleHandle(Conflict):
    """A page handle whose generation has passed."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    default_code = "stale_handle"


class StaleAttempt(Conflict):
    """A message of an attempt that has been replaced by a later one."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    default_code = "stale_attempt"


class RequestTooLarge(MeshError):
    """The request is over a size limit."""

    grpc_status = grpc.StatusCode.OUT_OF_RANGE
    http_status = 413
    openai_type = "invalid_request_error"
    default_code = "request_too_large"


class RateLimited(MeshError):
    """The caller's own share is used up for now."""

    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    openai_type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class OutOfPages(MeshError):
    """No free KV pages now."""

    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 503
    default_code = "out_of_pages"


class Overloaded(MeshError):
    """Refused early, so that accepted work keeps its speed."""

    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    default_code = "overloaded"


class Unavailable(MeshError):
    """A part that the answer needs cannot be reached now."""

    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    default_code = "unavailable"


class DeadlineExceeded(MeshError):
    """The caller's time ran out."""

    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    default_code = "deadline_exceeded"


class Cancelled(MeshError):
    """The caller went away, or the callee was told to stop."""

    grpc_status = grpc.StatusCode.CANCELLED
    http_status = 499
    default_code = "cancelled"


class Unimplemented(MeshError):
    """Valid, and not served."""

    grpc_status = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400
    openai_type = "invalid_request_error"
    default_code = "unsupported"


class InternalError(MeshError):
    """A fault of the mesh. The message never carries internals."""

    default_code = "internal_error"


# Ordered so that the first class of a gRPC or HTTP status is its general one.
ERRORS: tuple[type[MeshError], ...] = (
    InvalidRequest,
    Unauthenticated,
    PermissionDenied,
    NotFound,
    ModelNotFound,
    Conflict,
    StaleHandle,
    StaleAttempt,
    RequestTooLarge,
    RateLimited,
    Unavailable,
    Overloaded,
    OutOfPages,
    DeadlineExceeded,
    Cancelled,
    Unimplemented,
    InternalError,
)

_BY_CODE = {cls.default_code: cls for cls in ERRORS if cls.default_code is not None}
_BY_HTTP: dict[int, type[MeshError]] = {}
_BY_GRPC: dict[grpc.StatusCode, type[MeshError]] = {}
_BY_BOTH: dict[tuple[grpc.StatusCode, int], type[MeshError]] = {}
for _cls in ERRORS:
    _BY_BOTH.setdefault((_cls.grpc_status, _cls.http_status), _cls)
    _BY_HTTP.setdefault(_cls.http_status, _cls)
    _BY_GRPC.setdefault(_cls.grpc_status, _cls)


@dataclass(frozen=True, slots=True)
class Abort:
    """What a server passes to `context.abort`."""

    code: grpc.StatusCode
    message: str
    trailing: tuple[tuple[str, bytes], ...]


def detail(error: MeshError) -> common_pb2.ErrorDetail:
    """The wire form of an error, without its message."""
    return common_pb2.ErrorDetail(
        code=error.code or "",
        param=error.param,
        retry_after_s=error.retry_after_s,
        http_status=error.http_status,
    )


def from_detail(wire: common_pb2.ErrorDetail, message: str) -> MeshError:
    """The error that `detail` was made from, as far as this version knows it."""
    return _build(wire, message, None)


def to_status(error: MeshError) -> Abort:
    """Status code, message and trailing metadata that carry the error whole."""
    status = status_pb2.Status(code=error.grpc_status.value[0], message=error.message)
    status.details.add().Pack(detail(error))
    return Abort(error.grpc_status, error.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshError:
    """The `MeshError` behind a failed call; never raises.

    A failure without detail (a lost connection, a message over the limit of
    gRPC itself) becomes the general error of its status.
    """
    message = error.details() or error.code().name
    fallback = _BY_GRPC.get(error.code(), InternalError)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Without a detail gRPC itself speaks: a message over MESSAGE_LIMIT.
        fallback = RequestTooLarge
    wire = _detail_of(error)
    return fallback(message) if wire is None else _build(wire, message, error.code())


def said_by_callee(error: grpc.aio.AioRpcError) -> bool:
    """Whether the service itself gave this error, so that it lives; a lost connection says nothing."""
    return _detail_of(error) is not None


def metadata_entries(metadata: Any) -> Iterable[tuple[str, str | bytes]]:
    """The entries of a call's metadata, whose type gRPC's stubs get wrong."""
    return metadata or ()


def _detail_of(error: grpc.aio.AioRpcError) -> common_pb2.ErrorDetail | None:
    for key, value in metadata_entries(error.trailing_metadata()):
        if key != STATUS_DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
            for item in status.details:
                wire = common_pb2.ErrorDetail()
                if item.Unpack(wire):
                    return wire
        except DecodeError:
            return None
    return None


def _build(wire: common_pb2.ErrorDetail, message: str, status: grpc.StatusCode | None) -> MeshError:
    cls = _BY_CODE.get(wire.code)
    if cls is None or cls.http_status != wire.http_status:
        general = _BY_HTTP.get(wire.http_status, InternalError)
        cls = general if status is None else _BY_BOTH.get((status, wire.http_status), general)
    return cls(
        message,
        code=wire.code or None,
        param=wire.param if wire.HasField("param") else None,
        retry_after_s=wire.retry_after_s if wire.HasField("retry_after_s") else None,
    )
