"""The NATS server's configuration file: loopback, JetStream on disk, one user per
role with the subjects that role may use.

Does not know the roles: the caller brings users and permissions.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_PAYLOAD_BYTES = 1024 * 1024
JETSTREAM_MEMORY_BYTES = 64 * 1024 * 1024
JETSTREAM_FILE_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class NatsUser:
    """A user and the only subjects it may publish and subscribe."""

    name: str
    password: str = field(repr=False)
    publish: Sequence[str] = ()
    subscribe: Sequence[str] = ()
    allow_responses: bool = False


@dataclass(frozen=True, slots=True)
class NatsTls:
    """PEM files of the server. With `verify_clients` they must show certificates of the same CA."""

    cert: Path
    key: Path
    ca: Path
    verify_clients: bool = False


@dataclass(frozen=True, slots=True)
class NatsServer:
    """One server. `store_dir` holds its streams."""

    name: str
    host: str
    port: int
    store_dir: Path
    users: Sequence[NatsUser]
    tls: NatsTls | None = None


def render(server: NatsServer) -> str:
    """The file's text. JSON throughout, which the server's own format contains."""
    document: dict[str, object] = {
        "server_name": server.name,
        "host": server.host,
        "port": server.port,
        "max_payload": MAX_PAYLOAD_BYTES,
        # The server notices a client that hangs after three of these.
        "ping_interval": "20s",
        "ping_max": 3,
        "write_deadline": "5s",
        "lame_duck_duration": "30s",
        "lame_duck_grace_period": "1s",
        "jetstream": {
            "store_dir": str(server.store_dir),
            "max_memory_store": JETSTREAM_MEMORY_BYTES,
            "max_file_store": JETSTREAM_FILE_BYTES,
        },
        "authorization": {"timeout": 5, "users": [_user(user) for user in server.users]},
        "logtime": True,
        "logtime_utc": True,
        "debug": False,
        "trace": False,
    }
    if server.tls is not None:
        document["tls"] = {
            "cert_file": str(server.tls.cert),
            "key_file": str(server.tls.key),
            "ca_file": str(server.tls.ca),
            "verify": server.tls.verify_clients,
            "timeout": 5,
        }
    return json.dumps(document, indent=1) + "\n"


def write_config(path: Path, server: NatsServer) -> None:
    """Writes the file, mode 0600: it holds passwords."""
    scratch = path.with_name(path.name + ".new")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(render(server))
    scratch.replace(path)


def nats_binary() -> Path | None:
    """The server beside this Python, or one on the path; None if there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    return Path(found) if found else None


def arguments(binary: Path, config: Path) -> list[str]:
    """The command line."""
    return [str(binary), "--config", str(config)]


def _user(user: NatsUser) -> dict[str, object]:
    permissions: dict[str, object] = {
        "publish": {"allow": list(user.publish)} if user.publish else {"deny": [">"]},
        "subscribe": {"allow": list(user.subscribe)} if user.subscribe else {"deny": [">"]},
    }
    if user.allow_responses:
        permissions["allow_responses"] = True
    return {"user": user.name, "password": user.password, "permissions": permissions}
