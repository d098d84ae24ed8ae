"""What a router is told: strictly, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh.config import ConfigError, IdentityFiles, MetricsConfig, ServiceConfig
from router.options import RouterOptions


def config(**options: Any) -> ServiceConfig:
    here = Path("/tmp")
    return ServiceConfig(
        name="router-0",
        role="router",
        node="n",
        state_dir=here,
        run_dir=here,
        listen="unix:/tmp/r.sock",
        advertise="unix:/tmp/r.sock",
        tls=False,
        identity=IdentityFiles(here, here, here),
        metrics=MetricsConfig("127.0.0.1", 0, here),
        options=options,
    )


def test_defaults_and_changes() -> None:
    options = RouterOptions.of(config(openai_port=8000, queue_limit=7, hang_s=4, prefill_stalled_s=9))
    assert (options.openai_port, options.openai_socket) == (8000, None)
    assert (options.patience.waiting, options.liveness.silent_s) == (7, 4.0)
    assert options.run_patience.stalled_s == 9.0
    assert options.model_cache == Path("/tmp/cache")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "openai_socket"),
        ({"openai_socket": "/a", "openai_port": 1}, "openai_port"),
        ({"openai_port": "80"}, "openai_port"),
        ({"openai_port": 80, "queue_s": 0}, "queue_s"),
        ({"openai_port": 80, "hang_s": True}, "hang_s"),
        ({"openai_port": 80, "quue_s": 5}, "quue_s"),
    ],
)
def test_what_is_not_understood_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RouterOptions.of(config(**options))
