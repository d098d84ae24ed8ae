"""The policy, pushed to routers whenever it changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz.directory import Directory, Snapshot
from iam_authz.metrics import IamMetrics
from iam_authz.service.wire import policy_message


class PolicyServicer(iam_pb2_grpc.PolicyServicer):
    """`kvmesh.v1.Policy`."""

    def __init__(self, directory: Directory, metrics: IamMetrics) -> None:
        self._directory = directory
        self._metrics = metrics
        self._built: tuple[Snapshot, iam_pb2.WatchResponse] | None = None

    async def Watch(
        self, request: iam_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[iam_pb2.WatchResponse]:
        """The whole policy at once, even to a caller who has that version: it tells that IAM is there."""
        self._metrics.watchers.inc()
        try:
            async for snapshot in self._directory.watch():
                yield self._message(snapshot)
        finally:
            self._metrics.watchers.dec()

    def _message(self, snapshot: Snapshot) -> iam_pb2.WatchResponse:
        # Built once for all routers.
        if self._built is None or self._built[0] is not snapshot:
            self._built = (snapshot, policy_message(snapshot))
        return self._built[1]
