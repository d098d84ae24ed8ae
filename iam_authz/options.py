"""The options of an IAM service, checked once at its start.

    issuers    list of {issuer, audience, jwks_url | jwks_file, and optionally
               algorithms, org_claim, org_map, project_claim, models_claim,
               require_typ, leeway_s, max_lifetime_s, soft_ttl_s, hard_ttl_s}
    bootstrap  {organisation, dev_key_file, models: [{name, source}]}

Unknown fields are errors: a misspelt restriction must not be a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mesh.config import ConfigError

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
DEFAULT_ALGORITHMS = ("RS256", "ES256", "EdDSA")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Issuer:
    """Whose bearer tokens are accepted, and what they must look like.

    `org_map` translates the organisation claim; when it is set, a value that it
    lacks is refused. `require_typ` is the header's `typ` (such as "at+jwt").
    """

    issuer: str
    audience: tuple[str, ...]
    jwks_url: str | None = None
    jwks_file: Path | None = None
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    org_claim: str = "org"
    org_map: Mapping[str, str] | None = None
    project_claim: str | None = None
    models_claim: str | None = None
    require_typ: str | None = None
    leeway_s: float = 30.0
    max_lifetime_s: float = 86_400.0
    soft_ttl_s: float = 300.0
    hard_ttl_s: float = 14_400.0


@dataclass(frozen=True, slots=True)
class BootstrapModel:
    """A catalogue entry that the first start makes."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What must exist after the start: an organisation, a key for it, models."""

    organisation: str
    dev_key_file: Path
    models: tuple[BootstrapModel, ...] = ()


@dataclass(frozen=True, slots=True)
class IamOptions:
    """Built by `parse_options` from `ServiceConfig.options`."""

    issuers: tuple[Issuer, ...] = ()
    bootstrap: Bootstrap | None = None


def parse_options(options: Mapping[str, Any]) -> IamOptions:
    """Raises ConfigError that names the field."""
    reader = _Reader(options, "options")
    issuers = tuple(
        _issuer(_Reader(item, f"options.issuers[{number}]"))
        for number, item in enumerate(reader.take("issuers", list, []))
    )
    seen = [issuer.issuer for issuer in issuers]
    if len(set(seen)) != len(seen):
        raise ConfigError("options.issuers: an issuer occurs twice")
    bootstrap = reader.take("bootstrap", dict, None)
    reader.end()
    return IamOptions(
        issuers, None if bootstrap is None else _bootstrap(_Reader(bootstrap, "options.bootstrap"))
    )


def _issuer(reader: _Reader) -> Issuer:
    url = reader.take("jwks_url", str, None)
    file = reader.take("jwks_file", str, None)
    if (url is None) == (file is None):
        raise ConfigError(f"{reader.where}: give one of jwks_url and jwks_file")
    if url is not None:
        _check_url(url, f"{reader.where}.jwks_url")
    algorithms = reader.strings("algorithms", DEFAULT_ALGORITHMS)
    for algorithm in algorithms:
        # Symmetric algorithms and "none" can never be configured.
        if algorithm not in ALGORITHMS:
            raise ConfigError(
                f"{reader.where}.algorithms: {algorithm!r} is not one of {', '.join(ALGORITHMS)}"
            )
    org_map = reader.take("org_map", dict, None)
    if org_map is not None and not all(isinstance(value, str) for value in org_map.values()):
        raise ConfigError(f"{reader.where}.org_map: not a map of strings")
    issuer = Issuer(
        issuer=reader.take("issuer", str),
        audience=reader.strings("audience"),
        jwks_url=url,
        jwks_file=None if file is None else Path(file),
        algorithms=algorithms,
        org_claim=reader.take("org_claim", str, "org"),
        org_map=org_map,
        project_claim=reader.take("project_claim", str, None),
        models_claim=reader.take("models_claim", str, None),
        require_typ=reader.take("require_typ", str, None),
        leeway_s=reader.seconds("leeway_s", 30.0, 0.0),
        max_lifetime_s=reader.seconds("max_lifetime_s", 86_400.0, 1.0),
        # A file is cheap to look at, so a change is seen soon.
        soft_ttl_s=reader.seconds("soft_ttl_s", 300.0 if url else 5.0, 0.0),
        hard_ttl_s=reader.seconds("hard_ttl_s", 14_400.0, 1.0),
    )
    reader.end()
    if not issuer.issuer or not issuer.audience or not all(issuer.audience):
        raise ConfigError(f"{reader.where}: issuer and audience are mandatory and not empty")
    return issuer


def _check_url(url: str, where: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname in LOOPBACK:
        return
    raise ConfigError(f"{where}: signing keys are fetched by https (http on loopback only)")


def _bootstrap(reader: _Reader) -> Bootstrap:
    models = []
    for number, item in enumerate(reader.take("models", list, [])):
        entry = _Reader(item, f"{reader.where}.models[{number}]")
        models.append(BootstrapModel(entry.take("name", str), entry.take("source", str)))
        entry.end()
    result = Bootstrap(
        reader.take("organisation", str), Path(reader.take("dev_key_file", str)), tuple(models)
    )
    reader.end()
    return result


class _Reader:
    """A JSON object that is consumed field by field."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: not an object")
        self._raw = dict(raw)
        self.where = where

    def take(self, name: str, kind: type, *default: Any) -> Any:
        value = self._raw.pop(name, None)
        if value is None:
            if default:
                return default[0]
            raise ConfigError(f"{self.where}.{name}: missing")
        if not isinstance(value, kind):
            raise ConfigError(f"{self.where}.{name}: expected {kind.__name__}, found {type(value).__name__}")
        return value

    def strings(self, name: str, *default: tuple[str, ...]) -> tuple[str, ...]:
        """One string, or a list of them."""
        value = self.take(name, object, *default)
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{self.where}.{name}: not a string or a list of strings")
        return tuple(items)

    def seconds(self, name: str, default: float, least: float) -> float:
        value = self.take(name, object, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ConfigError(f"{self.where}.{name}: not a number of seconds of {least:g} or more")
        return float(value)

    def end(self) -> None:
        if self._raw:
            raise ConfigError(f"{self.where}: unknown field {', '.join(sorted(self._raw))}")
