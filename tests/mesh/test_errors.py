"""Every error crosses a process and comes back as itself."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from mesh import errors
from mesh.errors import ERRORS, MeshError, detail, from_detail, from_rpc_error, to_status


def _as_rpc_error(error: MeshError) -> grpc.aio.AioRpcError:
    abort = to_status(error)
    return grpc.aio.AioRpcError(
        abort.code, grpc.aio.Metadata(), grpc.aio.Metadata(*abort.trailing), abort.message, ""
    )


@pytest.mark.parametrize("cls", ERRORS)
def test_an_error_comes_back_as_itself(cls: type[MeshError]) -> None:
    error = from_rpc_error(_as_rpc_error(cls("why")))
    assert type(error) is cls
    assert (error.message, error.code, error.param, error.retry_after_s) == (
        "why",
        cls.default_code,
        None,
        None,
    )


@pytest.mark.parametrize("cls", ERRORS)
def test_the_details_come_back(cls: type[MeshError]) -> None:
    error = from_rpc_error(_as_rpc_error(cls("why", code="own_code", param="messages.0", retry_after_s=1.5)))
    assert (error.code, error.param, error.retry_after_s) == ("own_code", "messages.0", 1.5)
    assert (error.http_status, error.grpc_status) == (cls.http_status, cls.grpc_status)


@pytest.mark.parametrize("cls", ERRORS)
def test_a_detail_inside_a_frame_comes_back(cls: type[MeshError]) -> None:
    assert type(from_detail(detail(cls("why")), "why")) is cls


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RequestTooLarge),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError),
    ],
)
@pytest.mark.parametrize("trailing", [b"", b"\xff\xff nonsense"])
def test_a_failure_without_detail_is_the_general_error(
    code: grpc.StatusCode, expected: type[MeshError], trailing: bytes
) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", trailing))
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "text", ""))
    assert type(error) is expected


def test_the_table_in_the_docstring_is_the_truth() -> None:
    rows: dict[str, Any] = {}
    for line in (errors.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[2].isdigit():
            rows[cells[0]] = tuple(cells[1:])
    assert rows == {
        cls.__name__: (
            cls.grpc_status.name,
            str(cls.http_status),
            cls.openai_type,
            cls.default_code or "null",
        )
        for cls in ERRORS
    }
