"""Channel options, the same on both ends of every connection.

gRPC's own default (4 MiB, received only) makes long prompts fail on whichever
end was forgotten.
"""

from __future__ import annotations

MESSAGE_LIMIT_BYTES = 32 * 1024 * 1024
METADATA_LIMIT_BYTES = 64 * 1024

KEEPALIVE_S = 30
KEEPALIVE_TIMEOUT_S = 10

Options = list[tuple[str, int | str]]


def _shared() -> Options:
    return [
        ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
        ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
    ]


def channel_options(*, tcp: bool, target_name: str | None) -> Options:
    """Options of a client. `target_name` is what the server's certificate must carry."""
    options = _shared()
    options += [
        # The mesh looks services up itself; no proxy or resolver has a say.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Not a pause but how long one try may take: a busy machine needs its time for a handshake.
        ("grpc.min_reconnect_backoff_ms", 2000),
        # A try costs nothing on one node, and a service that is back must not be waited for.
        ("grpc.max_reconnect_backoff_ms", 2000 if tcp else 300),
        # Channels do not share a connection: one that breaks breaks alone.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tcp:
        # A Unix socket tells of a dead peer by itself; a network does not.
        options += [
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if target_name is not None:
        options.append(("grpc.ssl_target_name_override", target_name))
    return options


def server_options(*, share_port: bool = False) -> Options:
    """Options of a server. Two servers on one port would share its connections: refused, unless
    one is to take over from the other."""
    return [
        *_shared(),
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]
