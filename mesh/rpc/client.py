"""The client's end: a channel that says who calls.

A thin layer over `grpc.aio.Channel` that adds two metadata entries to every call.
It is not built from gRPC's interceptors because those put a task and a queue
around each call; this one costs a dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from mesh.ca import dns_name, role_dns_name
from mesh.identity import ServiceIdentity
from mesh.rpc.auth import SERVICE_TOKEN_KEY, TRACEPARENT_KEY
from mesh.rpc.limits import channel_options
from mesh.telemetry.propagation import current_traceparent


def open_channel(
    address: str,
    identity: ServiceIdentity,
    *,
    callee_role: str,
    tls: bool,
    callee_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to a service of `callee_role` at `address` (`unix:/path` or `host:port`).

    Connects on first use and reconnects by itself. With `tls` both ends show
    certificates of the mesh's CA, and the server's must be of `callee_role`, or of
    the one service `callee_name`.
    Failed calls raise `grpc.aio.AioRpcError`; see `mesh.errors.from_rpc_error`.
    """
    unix = address.startswith("unix:")
    if not unix and not tls:
        raise ValueError(f"{address}: without TLS services are reached over Unix sockets only")
    target_name = role_dns_name(callee_role) if callee_name is None else dns_name(callee_name)
    if unix:
        inner = grpc.aio.insecure_channel(address, options=channel_options(tcp=False, target_name=None))
    else:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=identity.ca_pem,
            private_key=identity.key_pem,
            certificate_chain=identity.cert_pem,
        )
        inner = grpc.aio.secure_channel(
            address, credentials, options=channel_options(tcp=True, target_name=target_name)
        )
    return _IdentifiedChannel(inner, lambda: identity.service_token(callee_role))


class _IdentifiedChannel(grpc.aio.Channel):
    """Adds the service token and the trace's parent to every call."""

    def __init__(self, inner: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._inner = inner
        self._token = token

    def _call(self, multicallable: Any) -> Any:
        token = self._token

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            entries: list[tuple[str, str | bytes]] = [(SERVICE_TOKEN_KEY, token())]
            traceparent = current_traceparent()
            if traceparent is not None:
                entries.append((TRACEPARENT_KEY, traceparent))
            if metadata is not None:
                entries.extend(metadata)
            return multicallable(*args, metadata=entries, **kwargs)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._inner.stream_stream(*args, **kwargs))

    async def __aenter__(self) -> _IdentifiedChannel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._inner.__aexit__(*exc)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()
