"""Free TCP ports on the loopback, and the clear word when a wanted one is taken."""

from __future__ import annotations

import random
import socket

# Below the range from which the kernel takes ports for outgoing connections: a port
# that a restarted process wants again must not have become somebody's client port.
_FIRST, _LAST = 20000, 32000
_TRIES = 200


class PortTaken(Exception):
    """Somebody else listens there; the message says how to go on."""


def check_free(host: str, port: int) -> None:
    """Raises PortTaken when `host`:`port` cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As a server binds: connections of an earlier one that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError:
            raise PortTaken(
                f"port {port} on {host} needs privileges; choose one above 1023 with --port"
            ) from None
        except OSError as error:
            raise PortTaken(
                f"port {port} on {host} is in use ({error.strerror}); choose another with --port"
            ) from None


class Ports:
    """Hands out free loopback ports, none twice."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._random = random.SystemRandom()

    def take(self) -> int:
        """Raises PortTaken when none can be found."""
        for _ in range(_TRIES):
            port = self._random.randint(_FIRST, _LAST)
            if port in self._given:
                continue
            try:
                check_free("127.0.0.1", port)
            except PortTaken:
                continue
            self._given.add(port)
            return port
        raise PortTaken(f"no free port between {_FIRST} and {_LAST} on 127.0.0.1")
