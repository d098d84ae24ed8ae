"""What a service is told at its start: one JSON file that the supervisor writes.

The file is read once, strictly: an unknown or a missing field is an error that
names it. `options` carries what only the role knows; each service builds its own
frozen options from it. Environment variables `KVMESH_OPTION_<NAME>` override one
option each. This module does not know any role's options.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OPTION_PREFIX = "KVMESH_OPTION_"

# How long the certificate of a service is good, if nobody says otherwise.
CERT_DAYS = 90


class ConfigError(Exception):
    """The configuration cannot be used; the message names the place."""


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """PEM files: private key (0600), certificate, and the CA that everyone trusts."""

    key: Path
    cert: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class NatsConfig:
    """Where the news are, and as whom. `ca` is set when the URL is tls://."""

    url: str
    user: str
    password: str = field(repr=False)
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where /metrics is served. Port 0 takes a free one; the token file guards it."""

    host: str
    port: int
    token_file: Path


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`path` is the resolved file, or the scheme itself (`tiny:seed=1`, `script:`)."""

    name: str
    source: str
    path: str


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One process of the mesh."""

    name: str
    role: str
    node: str
    state_dir: Path
    run_dir: Path
    listen: str
    advertise: str
    tls: bool
    identity: IdentityFiles
    metrics: MetricsConfig
    nats: NatsConfig | None = None
    iam: tuple[str, ...] = ()
    kvstore: str = ""
    model: ModelConfig | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    # Tests may make things go wrong here; see mesh.faults.
    fault_points: bool = False
    # A successor may start while this one still serves, on the same address.
    side_by_side: bool = False


def load_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServiceConfig:
    """Reads `--config FILE` from `argv` (without the program's name).

    Raises ConfigError; exits with status 2 on a wrong command line.
    """
    parser = argparse.ArgumentParser(description="One service of a kvmesh.")
    parser.add_argument("--config", required=True, type=Path, help="JSON file written by the supervisor")
    path: Path = parser.parse_args(argv).config
    return read_config(path, os.environ if environ is None else environ)


def read_config(path: Path, environ: Mapping[str, str]) -> ServiceConfig:
    """The configuration in `path` with the overrides of `environ`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    options = dict(_options(raw, path))
    for key, value in environ.items():
        if key.startswith(OPTION_PREFIX):
            options[key.removeprefix(OPTION_PREFIX).lower()] = _json_or_text(value)
    try:
        return _service({**raw, "options": options})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_config(path: Path, config: ServiceConfig) -> None:
    """Writes what `read_config` reads, readable by the owner only (it holds a password)."""
    document = asdict(config)
    scratch = path.with_name(path.name + ".new")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump(document, file, indent=2, default=str)
        file.write("\n")
    scratch.replace(path)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _options(raw: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    options = raw.get("options", {})
    if not isinstance(options, dict):
        raise ConfigError(f"{path}: options: not an object")
    return options


class _Fields:
    """One JSON object that is consumed field by field; what is left over is an error."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise ConfigError(f"{where or 'the file'}: not an object")
        self._raw = dict(raw)
        self._where = where

    def take(self, name: str, kind: type, *default: Any) -> Any:
        place = f"{self._where}.{name}" if self._where else name
        if name not in self._raw:
            if default:
                return default[0]
            raise ConfigError(f"{place}: missing")
        value = self._raw.pop(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{place}: expected {kind.__name__}, found {type(value).__name__}")
        return value

    def nested(self, name: str, build: Callable[[_Fields], Any], *, required: bool = False) -> Any:
        place = f"{self._where}.{name}" if self._where else name
        value = self._raw.pop(name, None)
        if value is None:
            if required:
                raise ConfigError(f"{place}: missing")
            return None
        fields = _Fields(value, place)
        result = build(fields)
        fields.end()
        return result

    def path(self, name: str) -> Path:
        return Path(self.take(name, str))

    def end(self) -> None:
        if self._raw:
            names = ", ".join(sorted(self._raw))
            raise ConfigError(f"{self._where or 'the file'}: unknown field {names}")


def _identity(fields: _Fields) -> IdentityFiles:
    return IdentityFiles(fields.path("key"), fields.path("cert"), fields.path("ca"))


def _nats(fields: _Fields) -> NatsConfig:
    url, user, password = fields.take("url", str), fields.take("user", str), fields.take("password", str)
    ca = fields.take("ca", object, None)
    return NatsConfig(url, user, password, None if ca is None else Path(str(ca)))


def _metrics(fields: _Fields) -> MetricsConfig:
    return MetricsConfig(fields.take("host", str), fields.take("port", int), fields.path("token_file"))


def _model(fields: _Fields) -> ModelConfig:
    return ModelConfig(fields.take("name", str), fields.take("source", str), fields.take("path", str))


def _service(raw: dict[str, Any]) -> ServiceConfig:
    fields = _Fields(raw, "")
    iam = fields.take("iam", list, [])
    if not all(isinstance(address, str) for address in iam):
        raise ConfigError("iam: expected a list of addresses")
    config = ServiceConfig(
        name=fields.take("name", str),
        role=fields.take("role", str),
        node=fields.take("node", str),
        state_dir=fields.path("state_dir"),
        run_dir=fields.path("run_dir"),
        listen=fields.take("listen", str),
        advertise=fields.take("advertise", str),
        tls=fields.take("tls", bool),
        identity=fields.nested("identity", _identity, required=True),
        metrics=fields.nested("metrics", _metrics, required=True),
        nats=fields.nested("nats", _nats),
        iam=tuple(iam),
        kvstore=fields.take("kvstore", str, ""),
        model=fields.nested("model", _model),
        options=fields.take("options", dict, {}),
        fault_points=fields.take("fault_points", bool, False),
        side_by_side=fields.take("side_by_side", bool, False),
    )
    fields.end()
    return config


def drain_file(run_dir: Path, name: str) -> Path:
    """Where the supervisor writes how long a process may finish its work, if not as long as usual."""
    return run_dir / f"{name}.drain"
