"""What `kvmesh up` was asked for: flags and a TOML file become one frozen dataclass.

The file has the flags' names (`kv-memory` or `kv_memory`), a table `[models]`, and
one table per role whose entries become that role's options. Flags win over the file.
Does not know what roles do with their options.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.config import CERT_DAYS
from mesh.supervisor.state import DEFAULT_STATE

DEFAULT_MODELS: Mapping[str, str] = {"smollm2": "pkg:smollm2"}
ROLES = ("nats", "iam", "kvstore", "responses", "prefill", "decode", "encode", "router", "envoy")
WORKERS = ("prefill", "decode")
COUNTED = ("iam", "router", "prefill", "decode", "encode")
# The processes that are not ours cannot refuse an option themselves.
_FOREIGN_OPTIONS: Mapping[str, Sequence[str]] = {
    "nats": (),
    "envoy": ("body_limit_bytes", "stream_idle_timeout_s", "authz_timeout_s", "router_retries", "tracing"),
}
MAX_DEFAULT_KV_BYTES = 4 * 1024**3
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_NODE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


class OptionsError(Exception):
    """What was asked cannot be done; the message names the option."""


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """One mesh. `kv_bytes` None: a quarter of the free memory, at most 4 GiB.

    `nodes`: the workers of each node by role, where there are several; `prefill` and
    `decode` are their sums then. Nodes share `kv_bytes` and `kv_disk_bytes` equally.

    `role_options` adds options to every process of a role.
    """

    state: Path = DEFAULT_STATE
    host: str = "127.0.0.1"
    port: int = 8080
    # Two, so that neither the death nor the restart of one is felt.
    iam: int = 2
    router: int = 1
    prefill: int = 1
    decode: int = 1
    encode: int = 1
    models: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_MODELS))
    kv_bytes: int | None = None
    # Evicted blocks on disk; None: none. It is tenants' text.
    kv_disk_bytes: int | None = None
    page_pool: int | None = None
    threads: int | None = None
    pin: bool = False
    executor: str | None = None
    kv_dtype: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    listen: str = "unix"
    tls: bool = False
    cert: Path | None = None
    key: Path | None = None
    edge: bool = True
    drain_s: float = 10.0
    # How long certificates of services are good; they are replaced in time (`renewal`).
    certificate_days: float = CERT_DAYS
    nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # For tests of what breaks: processes do what `mesh.faults` rules ask.
    fault_points: bool = False
    role_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return f"{self.scheme}://{shown}:{self.port}"

    def check(self) -> None:
        """Raises OptionsError for a mesh that must not or cannot be started."""
        for name in COUNTED:
            if not 1 <= getattr(self, name) <= 64:
                raise OptionsError(f"--{name}: between 1 and 64, not {getattr(self, name)}")
        if not 1 <= self.port <= 65535:
            raise OptionsError(f"--port: between 1 and 65535, not {self.port}")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise OptionsError(f"--threads: between 1 and 1024, not {self.threads}")
        if not self.models:
            raise OptionsError("--model: at least one model")
        if self.listen not in ("unix", "tcp"):
            raise OptionsError(f"--listen: unix or tcp, not {self.listen}")
        if (self.cert is None) != (self.key is None):
            raise OptionsError("--cert and --key go together")
        if self.cert is not None and not self.tls:
            raise OptionsError("--cert and --key need --tls")
        for option, file in (("--cert", self.cert), ("--key", self.key)):
            if file is not None and not os.access(file, os.R_OK):
                raise OptionsError(f"{option} {file}: there is no such file, or it cannot be read")
        if not self.tls and not _is_loopback(self.host):
            raise OptionsError(f"--host {self.host}: an address that others can reach needs --tls")
        if self.kv_bytes is not None and self.kv_bytes < 1024 * 1024:
            raise OptionsError("--kv-memory: at least 1M")
        if not 0 < self.certificate_days <= CERT_DAYS:
            raise OptionsError(f"certificate_days: above 0 and at most {CERT_DAYS}")
        if self.kv_disk_bytes is not None and self.kv_disk_bytes < 1024 * 1024:
            raise OptionsError("--kv-disk: at least 1M")


def parse_model(text: str) -> tuple[str, str]:
    """`NAME=SOURCE`; raises OptionsError."""
    name, separator, source = text.partition("=")
    if not separator or not source.strip():
        raise OptionsError(f"{text!r}: a model is NAME=SOURCE, such as smollm2=pkg:smollm2")
    if not _MODEL_NAME.fullmatch(name):
        raise OptionsError(f"{name!r}: not a model name (letters, digits and . _ : / @ + -)")
    return name, source.strip()


def parse_node(text: str) -> tuple[str, dict[str, int]]:
    """`NAME=prefill[:N],decode[:N]`: a node and its workers per model; raises OptionsError."""
    name, _, roles = text.partition("=")
    if not _NODE_NAME.fullmatch(name):
        raise OptionsError(f"--node {text}: a node's name is of a-z, 0-9 and -, such as a=prefill,decode:2")
    counts = dict.fromkeys(WORKERS, 0)
    for part in roles.split(","):
        role, _, count = part.partition(":")
        if role not in WORKERS or not (count or "1").isdigit():
            raise OptionsError(
                f"--node {text}: after the name come prefill and decode, such as a=prefill,decode:2"
            )
        counts[role] += int(count or "1")
    if not sum(counts.values()):
        raise OptionsError(f"--node {text}: a node without workers")
    return name, counts


def parse_size(text: str) -> int:
    """`512M`, `1.5GiB` or a number of bytes, in bytes (units of 1024); raises OptionsError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionsError(f"{text!r}: not a size; write 512M or 2G")
    factor = 1024 ** " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * factor)


def read_file(path: Path) -> dict[str, Any]:
    """The TOML file as keyword arguments of MeshOptions; raises OptionsError."""
    import tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionsError(f"--config {path}: {error}") from error
    values: dict[str, Any] = {}
    tables: dict[str, Mapping[str, Any]] = {}
    for raw_name, value in document.items():
        name = raw_name.replace("-", "_")
        if isinstance(value, dict) and name in ROLES:
            # A table `[decode]` holds the role's options; `count` in it is how many.
            tables[name] = {k.replace("-", "_"): v for k, v in value.items() if k != "count"}
            if "count" in value:
                if name not in COUNTED:
                    raise OptionsError(f"--config {path}: {name}.count: there is one of it")
                values[name] = _field(name, value["count"], path)
            _check_table(name, tables[name], path)
        elif name == "nodes":
            values["nodes"] = _nodes(value, path)
        elif name == "models":
            values["models"] = _models(value, path)
        elif name in _FILE_FIELDS:
            values[_FILE_FIELDS[name][0]] = _field(name, value, path)
        else:
            raise OptionsError(f"--config {path}: unknown name {raw_name!r}")
    values["role_options"] = tables
    return values


def stored_models(path: Path) -> dict[str, str] | None:
    """The models that `kvmesh models` wrote down; None where nothing is."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, json.JSONDecodeError) as error:
        raise OptionsError(f"{path}: {error}") from error
    return _models(document, path)


def process_slug(model: str) -> str:
    """A model's name as part of a process's name: short, and unique to the model."""
    slug = re.sub(r"[^a-z0-9.]+", "-", model.lower()).strip("-.")
    if slug == model and len(slug) <= 24:
        return slug
    from hashlib import blake2b

    digest = blake2b(model.encode(), digest_size=3).hexdigest()
    return f"{slug[:17].rstrip('-.')}-{digest}" if slug else digest


def default_kv_bytes(available_bytes: int) -> int:
    """A quarter of the free memory, at most 4 GiB."""
    return max(16 * 1024 * 1024, min(available_bytes // 4, MAX_DEFAULT_KV_BYTES))


_FILE_FIELDS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "state": ("state", str),
    "host": ("host", str),
    "port": ("port", int),
    "iam": ("iam", int),
    "router": ("router", int),
    "prefill": ("prefill", int),
    "decode": ("decode", int),
    "encode": ("encode", int),
    "kv_memory": ("kv_bytes", (str, int)),
    "kv_disk": ("kv_disk_bytes", (str, int)),
    "page_pool": ("page_pool", int),
    "threads": ("threads", int),
    "pin": ("pin", bool),
    "executor": ("executor", str),
    "kv_dtype": ("kv_dtype", str),
    "tool_parser": ("tool_parser", str),
    "reasoning_parser": ("reasoning_parser", str),
    "listen": ("listen", str),
    "tls": ("tls", bool),
    "cert": ("cert", str),
    "key": ("key", str),
    "edge": ("edge", bool),
    "drain_s": ("drain_s", (int, float)),
    "certificate_days": ("certificate_days", (int, float)),
}


def _field(name: str, value: Any, path: Path) -> Any:
    target, kind = _FILE_FIELDS[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise OptionsError(f"--config {path}: {name}: not a value of the right type: {value!r}")
    if target in ("kv_bytes", "kv_disk_bytes"):
        return parse_size(str(value))
    if target in ("state", "cert", "key"):
        return Path(str(value))
    return value


def _check_table(role: str, table: Mapping[str, Any], path: Path) -> None:
    if role not in _FOREIGN_OPTIONS:
        return
    known = _FOREIGN_OPTIONS[role]
    for name in table:
        if name not in known:
            raise OptionsError(f"--config {path}: {role}.{name}: there are {', '.join(known) or 'none'}")


def _models(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(source, str) for source in value.values()):
        raise OptionsError(f'{path}: models: a table of NAME = "SOURCE"')
    return dict(parse_model(f"{name}={source}") for name, source in value.items())


def _distinct(nodes: Sequence[tuple[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    names = [name for name, _ in nodes]
    if len(set(names)) < len(names):
        raise OptionsError("--node: two nodes have one name")
    return dict(nodes)


def _nodes(value: Any, path: Path) -> dict[str, dict[str, int]]:
    if not isinstance(value, dict) or not all(isinstance(roles, str) for roles in value.values()):
        raise OptionsError(f'--config {path}: nodes: a table of NAME = "prefill,decode:2"')
    return dict(parse_node(f"{name}={roles}") for name, roles in value.items())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def merged(
    file_values: Mapping[str, Any], flags: Mapping[str, Any], models: Sequence[str], nodes: Sequence[str] = ()
) -> MeshOptions:
    """Options from a file and flags (None: not given); raises OptionsError."""
    values = {**file_values, **{k: v for k, v in flags.items() if v is not None}}
    if models:
        values["models"] = dict(parse_model(text) for text in models)
    if nodes:
        values["nodes"] = _distinct([parse_node(text) for text in nodes])
    for role in WORKERS if values.get("nodes") else ():
        if role in values:
            raise OptionsError(f"--{role} and --node: with nodes, each says how many {role} workers it has")
        values[role] = sum(counts[role] for counts in values["nodes"].values())
    options = MeshOptions(**values)
    options.check()
    return options
