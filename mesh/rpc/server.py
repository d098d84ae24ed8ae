"""The server's end: doorkeeper, typed errors, spans, health and reflection.

One interceptor covers the four kinds of call. A servicer raises `MeshError`; the
caller gets its status and detail. Anything else is logged here and reaches the
caller as INTERNAL without a word about it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from mesh.config import ServiceConfig
from mesh.errors import InternalError, MeshError, Unavailable, Unimplemented, to_status
from mesh.identity import ServiceIdentity, TokenVerifier
from mesh.rpc.auth import TRACEPARENT_KEY, Doorkeeper, current_caller
from mesh.rpc.limits import server_options
from mesh.sockets import SocketPlace
from mesh.telemetry.propagation import server_span

log = logging.getLogger(__name__)

# gRPC's stubs call these generic, its classes are not.
Handler = Any
Context = Any

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RpcServer:
    """The gRPC server of one service.

    Add servicers to `server`, then `start`. Health answers NOT_SERVING until
    `set_serving(True)`. `allowed`: see `mesh.rpc.auth.Doorkeeper`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        identity: ServiceIdentity,
        *,
        allowed: Mapping[str, Collection[str]],
        verifier: TokenVerifier | None = None,
    ) -> None:
        self._listen = config.listen
        self._identity = identity
        self._tls = config.tls
        self._place: SocketPlace | None = None
        if not self._tls and not self._listen.startswith("unix:"):
            raise ValueError(f"{self._listen}: without TLS a service listens on a Unix socket only")
        verifier = verifier or TokenVerifier(config.identity.ca)
        doorkeeper = Doorkeeper(verifier, role=config.role, allowed=allowed, tls=self._tls_on_wire)
        self.server: grpc.aio.Server = grpc.aio.server(
            interceptors=[_Guard(doorkeeper)], options=server_options(share_port=config.side_by_side)
        )
        self.health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.address = self._listen

    @property
    def _tls_on_wire(self) -> bool:
        return self._tls and not self._listen.startswith("unix:")

    async def start(self, reflected: Iterable[str] = ()) -> None:
        """Binds and serves. `address` is then what was bound (port 0 takes a free port).

        `reflected` are the full names of services that reflection describes.
        Raises OSError if the address cannot be had.
        """
        reflection.enable_server_reflection(
            (*reflected, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self.server,
        )
        await self.set_serving(False)
        try:
            port = self._bind()
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._listen}: {error}") from error
        if not self._listen.startswith("unix:"):
            self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        await self.server.start()
        if self._place is not None:
            self._place.take()

    def _bind(self) -> int:
        if not self._tls_on_wire:
            self._place = SocketPlace(Path(self._listen.removeprefix("unix:")))
            return self.server.add_insecure_port(f"unix:{self._place.own}")
        credentials = grpc.ssl_server_credentials(
            [(self._identity.key_pem, self._identity.cert_pem)],
            root_certificates=self._identity.ca_pem,
            require_client_auth=True,
        )
        return self.server.add_secure_port(self._listen, credentials)

    async def set_serving(self, serving: bool) -> None:
        """What health answers for the server as a whole."""
        await self.health.set("", SERVING if serving else NOT_SERVING)

    async def stop(self, grace_s: float | None = 5.0) -> None:
        """Health says no, no new calls; running ones have `grace_s` seconds."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
        if self._place is not None:
            self._place.leave()


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper
        # gRPC asks for the handler on every call; wrapping is done once per method.
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(self._unknown_method(method))
        if self._doorkeeper.exempt(method):
            return handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = (handler, self._wrap(method, handler))
            self._wrapped[method] = known
        return known[1]

    def _unknown_method(self, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            try:
                self._doorkeeper.admit(method, context)
                raise Unimplemented(f"there is no method {method}")
            except MeshError as error:
                await _abort(context, error)

        return answer

    def _wrap(self, method: str, handler: Handler) -> Handler:
        build, inner = _kind(handler)
        run = _streaming(inner) if handler.response_streaming else inner
        if not inspect.iscoroutinefunction(run):
            # What the generated servicer has for a method that nobody wrote.
            return grpc.unary_unary_rpc_method_handler(self._unknown_method(method))
        guarded = self._guarded(method, run)
        return build(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guarded(
        self, method: str, run: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                current_caller.set(self._doorkeeper.admit(method, context))
                with server_span(method, _traceparent(context)):
                    return await run(request, context)
            except MeshError as error:
                await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except grpc.aio.AioRpcError as error:
                log.exception("%s: a call to another service failed", method)
                lost = error.code() is grpc.StatusCode.UNAVAILABLE
                await _abort(
                    context,
                    Unavailable("another service cannot be reached")
                    if lost
                    else InternalError("internal error"),
                )
            except Exception:
                log.exception("%s failed", method)
                await _abort(context, InternalError("internal error"))

        return guarded


def _kind(handler: Handler) -> tuple[Callable[..., Handler], Any]:
    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler, handler.stream_stream
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _streaming(inner: Any) -> Callable[[Any, Context], Awaitable[None]]:
    """A generator servicer as a coroutine that writes.

    So the generator is closed in the call's own task the moment the call is
    cancelled, and not when the garbage collector finds it.
    """
    if not inspect.isasyncgenfunction(inner):
        return inner  # type: ignore[no-any-return]

    async def write_all(request: Any, context: Context) -> None:
        responses: AsyncIterator[Any] = inner(request, context)
        async with contextlib.aclosing(responses):  # type: ignore[type-var]
            async for response in responses:
                await context.write(response)

    return write_all


async def _abort(context: Context, error: MeshError) -> None:
    abort = to_status(error)
    await context.abort(abort.code, abort.message, abort.trailing)


def _traceparent(context: Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == TRACEPARENT_KEY and isinstance(value, str):
            return value
    return None
