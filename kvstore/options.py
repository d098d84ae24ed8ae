"""What the store is told: one frozen dataclass, built from the options of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.config import ConfigError


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`kv_bytes` is the budget of all arenas, shared by the `models` known at the start.

    `page_pool` sets the number of pages of every arena instead. `debug_fill` fills
    freed pages with 0xFF, which is NaN in every float format. `compress` asks other
    nodes to deflate the pages that they send. `directory` holds what is this store's own;
    None: the state directory, which then has one store. Without
    `byte_path` other nodes pull over gRPC. `pages_listen` is where the byte path listens
    (host:port or unix:PATH); None: beside the store's own address, on a free port. One
    organisation's prompts hold at most `org_share` of the pages of a model, and of the disk.
    `disk_bytes` is what evicted blocks may take on disk; 0: none.
    """

    kv_bytes: int
    models: int = 1
    page_pool: int | None = None
    debug_fill: bool = False
    compress: bool = False
    directory: Path | None = None
    byte_path: bool = True
    pages_listen: str | None = None
    org_share: float = 1.0
    disk_bytes: int = 0


def store_options(options: Mapping[str, Any]) -> StoreOptions:
    """Strict: an unknown option or a value out of range is a ConfigError that names it."""
    rest = dict(options)
    kv_bytes = _positive(rest.pop("kv_bytes", None), "kv_bytes")
    models = _positive(rest.pop("models", None) or 1, "models")
    page_pool = rest.pop("page_pool", None)
    debug_fill = _switch(rest, "debug_fill")
    compress = _switch(rest, "compress")
    byte_path = _switch(rest, "byte_path", True)
    directory = rest.pop("directory", None)
    org_share = rest.pop("org_share", 1.0)
    if isinstance(org_share, bool) or not isinstance(org_share, (int, float)) or not 0 < org_share <= 1:
        raise ConfigError(f"options.org_share: expected a number above 0, at most 1, found {org_share!r}")
    disk_bytes = rest.pop("disk_bytes", 0)
    if disk_bytes != 0:
        _positive(disk_bytes, "disk_bytes")
    pages_listen = rest.pop("pages_listen", None)
    for name, value in (("directory", directory), ("pages_listen", pages_listen)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"options.{name}: expected a text")
    if rest:
        raise ConfigError(f"options: unknown to the KV store: {', '.join(sorted(rest))}")
    return StoreOptions(
        kv_bytes,
        models,
        None if page_pool is None else _positive(page_pool, "page_pool"),
        debug_fill,
        compress,
        None if directory is None else Path(directory),
        byte_path,
        pages_listen,
        float(org_share),
        disk_bytes,
    )


def _switch(options: dict[str, Any], name: str, default: bool = False) -> bool:
    value = options.pop(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"options.{name}: expected true or false")
    return value


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"options.{name}: expected a number above 0, found {value!r}")
    return value
