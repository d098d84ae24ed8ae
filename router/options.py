"""What a router is told beside what every service is told.

| option | default | what |
|---|---|---|
| openai_socket | – | path of the OpenAI face's Unix socket |
| openai_port | – | or its port on loopback; one of the two must be given |
| queue_limit | 1024 | requests that may wait for a worker of one model |
| queue_s | 300 | how long each may wait |
| no_worker_s | 30 | how long one waits for a model that no worker serves |
| hang_s | 2 | silence of a decode worker with work that makes it hung |
| step_stuck_s | 120 | beats without a step that make it hung |
| prefill_stalled_s | 5 | silence of a running prefill that makes it hung |
| responses | – | address of the service that keeps responses; without it none are kept |
| policy_usable_s | 60 | how long decisions are made without IAM |
| drain_s | 600 | how long answers that run may take after SIGTERM |
| tool_parser | by the template | how models write calls: `NAME`, or `MODEL=NAME,…` |
| reasoning_parser | by the template | how they mark their thinking: the same; `none` is not at all |
| model_cache | `<state>/cache` | where model files are kept |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.config import ConfigError, ServiceConfig
from router.admission import Patience
from router.parsers import Parsers, parsers_of
from router.prefill_runs import RunPatience
from router.sessions import Liveness

NAMES = frozenset(
    {
        "openai_socket",
        "openai_port",
        "queue_limit",
        "queue_s",
        "no_worker_s",
        "hang_s",
        "step_stuck_s",
        "prefill_stalled_s",
        "policy_usable_s",
        "drain_s",
        "model_cache",
        "tool_parser",
        "reasoning_parser",
        "responses",
    }
)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Built once, from the service's configuration."""

    openai_socket: Path | None
    openai_port: int | None
    patience: Patience
    liveness: Liveness
    run_patience: RunPatience
    policy_usable_s: float
    drain_s: float
    model_cache: Path
    responses: str = ""
    parsers: Parsers = field(default_factory=Parsers)

    @classmethod
    def of(cls, config: ServiceConfig) -> RouterOptions:
        """Raises ConfigError that names the option."""
        options = config.options
        unknown = sorted(set(options) - NAMES)
        if unknown:
            raise ConfigError(f"options: unknown to a router: {', '.join(unknown)}")
        socket, port = options.get("openai_socket"), options.get("openai_port")
        if (socket is None) == (port is None):
            raise ConfigError("options: exactly one of openai_socket and openai_port is needed")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
            raise ConfigError("options.openai_port: expected a number")
        patience, liveness, runs = Patience(), Liveness(), RunPatience()
        return cls(
            openai_socket=None if socket is None else Path(str(socket)),
            openai_port=port,
            patience=Patience(
                waiting=int(_number(options, "queue_limit", patience.waiting)),
                queue_s=_number(options, "queue_s", patience.queue_s),
                no_worker_s=_number(options, "no_worker_s", patience.no_worker_s),
            ),
            liveness=Liveness(
                silent_s=_number(options, "hang_s", liveness.silent_s),
                stuck_s=_number(options, "step_stuck_s", liveness.stuck_s),
            ),
            run_patience=RunPatience(stalled_s=_number(options, "prefill_stalled_s", runs.stalled_s)),
            policy_usable_s=_number(options, "policy_usable_s", 60.0),
            drain_s=_number(options, "drain_s", 600.0),
            model_cache=Path(str(options.get("model_cache", config.state_dir / "cache"))),
            responses=str(options.get("responses", "")),
            parsers=parsers_of(options.get("tool_parser", ""), options.get("reasoning_parser", "")),
        )


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"options.{name}: expected a number above 0")
    return float(value)
