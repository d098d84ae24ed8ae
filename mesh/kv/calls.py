"""One rpc to the store, from a session that may break under it.

An rpc whose outcome is not known ends its session: the re-attach tells the store
what is held, and the store answers what it knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio
from kvmesh.v1 import common_pb2

from mesh.errors import Unavailable, from_rpc_error
from mesh.kv.page import Page
from mesh.kv.session import StoreSession

# The rpc may have been carried out, or may still be: only a re-attach can tell.
_UNCERTAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)

# A store answers in milliseconds, or after it has compared some pages with their checksums. One
# that hangs is not waited for: the session ends, and what its outcome was a re-attach settles.
CALL_S = 5.0

T = TypeVar("T")


class Calls:
    """Runs the unary rpcs of one worker."""

    def __init__(self, session: StoreSession) -> None:
        self.stub = session.stub
        self._session = session
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def connected(self) -> bool:
        """Whether the store can be asked now."""
        return self._session.number != 0

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """Raises Unavailable when the store is away or the outcome is not known, else what it refused."""
        number = self._session.number
        if number == 0:
            raise Unavailable("the KV store is away")
        request.epoch, request.session = self._session.epoch, number
        call = method(request, timeout=CALL_S)
        self._session.flying.add(call)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNCERTAIN:
                self._session.renew(number)
                raise Unavailable(f"the KV store is away: {error.details()}") from error
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._session.number != number and (task is None or not task.cancelling()):
                raise Unavailable("the session with the KV store broke") from None
            self._session.renew(number)
            raise
        finally:
            self._session.flying.discard(call)
        if self._session.number != number:
            raise Unavailable("the session with the KV store broke")
        return response

    async def finish(self, work: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
        """Runs `work` to its end even if the caller is cancelled: its answer must be known.

        `undo` then gets the answer that nobody waits for any more.
        """
        task = self.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:

            def settle(done: asyncio.Task[T]) -> None:
                if not done.cancelled() and done.exception() is None and undo is not None:
                    undo(done.result())

            task.add_done_callback(settle)
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that is kept alive until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Ends whatever runs."""
        for task in list(self._tasks):
            task.cancel()


def handle_of(page: Page) -> common_pb2.PageHandle:
    """A page as it crosses the wire."""
    return common_pb2.PageHandle(page=page.index, generation=page.generation)


def pages_of(handles: Iterable[common_pb2.PageHandle]) -> list[Page]:
    """Pages that crossed the wire."""
    return [Page(h.page, h.generation) for h in handles]
