"""gRPC as this mesh uses it: one set of limits, identities on every call, typed errors.

`open_channel` is the client's end, `RpcServer` the server's. Neither knows any service.
"""

from mesh.rpc.auth import SERVICE_TOKEN_KEY, TRACEPARENT_KEY, caller
from mesh.rpc.client import open_channel
from mesh.rpc.limits import MESSAGE_LIMIT_BYTES
from mesh.rpc.server import RpcServer
from mesh.rpc.welcome import await_welcome, send_welcome

__all__ = [
    "MESSAGE_LIMIT_BYTES",
    "SERVICE_TOKEN_KEY",
    "TRACEPARENT_KEY",
    "RpcServer",
    "await_welcome",
    "caller",
    "open_channel",
    "send_welcome",
]
