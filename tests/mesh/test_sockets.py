"""A socket's place is taken over without a gap."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from mesh.sockets import SocketPlace


def listen(place: SocketPlace) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place.own))
    listener.listen(4)
    return listener


def test_a_successor_takes_the_place_and_the_predecessor_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    first = SocketPlace(path)
    with listen(first):
        assert not path.exists()
        first.take()
        assert path.stat().st_mode & 0o777 == 0o600
        second = SocketPlace(path)
        with listen(second) as now, socket.socket(socket.AF_UNIX) as client:
            second.take()
            first.leave()
            client.connect(str(path))
            now.settimeout(5)
            now.accept()[0].close()
            second.leave()
    assert os.listdir(tmp_path) == []
