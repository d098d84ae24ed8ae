"""How a server says that it has taken a stream, before it has anything else to say.

gRPC for Python gives a call that failed (nobody listens, the call was refused) empty
initial metadata instead of an error. So only metadata with something in it proves
that there is a server behind the call.
"""

from __future__ import annotations

from typing import Any

from mesh.errors import Unavailable

_WELCOME = ("x-mesh-welcome", "1")


async def send_welcome(context: Any) -> None:
    """To be called by the servicer before its first answer."""
    await context.send_initial_metadata((_WELCOME,))


async def await_welcome(call: Any) -> None:
    """Returns once the server has taken the stream. Raises Unavailable if it will not."""
    metadata = await call.initial_metadata()
    if _WELCOME not in {(str(key), value) for key, value in metadata or ()}:
        reason = await call.details() if call.done() else "no welcome"
        raise Unavailable(f"the stream was not taken: {reason}")
