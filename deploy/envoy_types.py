"""Names of Envoy's types, and the small shapes that every part of the document repeats."""

from __future__ import annotations

from typing import Any

_PREFIX = "type.googleapis.com/"


def typed(name: str, **fields: Any) -> dict[str, Any]:
    """A `typed_config` of the type `name` (without the URL's host)."""
    return {"@type": _PREFIX + name, **fields}


def extension(name: str, type_name: str, **fields: Any) -> dict[str, Any]:
    """A named extension with its `typed_config`."""
    return {"name": name, "typed_config": typed(type_name, **fields)}


def set_header(key: str, value: str) -> dict[str, Any]:
    """Sets a header, whatever was there."""
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def seconds(value_s: float) -> str:
    """Envoy's notation of a duration."""
    return f"{value_s:g}s"


def address(target: str) -> dict[str, Any]:
    """Envoy's form of a gRPC address: "unix:/path" or "host:port"."""
    if target.startswith("unix:"):
        return {"pipe": {"path": target.removeprefix("unix:")}}
    host, _, port = target.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def other_hosts() -> dict[str, Any]:
    """The part of a retry policy that prefers a host that was not tried yet."""
    predicate = extension(
        "envoy.retry_host_predicates.previous_hosts",
        "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
    )
    return {"retry_host_predicate": [predicate], "host_selection_retry_max_attempts": 3}
