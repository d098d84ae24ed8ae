"""Runs for tests: correct ones, made from a prompt."""

from __future__ import annotations

from typing import Any

from mesh.blocks import chain
from prefill.run import Order

ROOT = bytes(range(16))
P = 16


def order(blocks: int, handoff_id: str = "r/0", **changes: Any) -> Order:
    tokens = tuple(i % 250 for i in range(blocks * P))
    values: dict[str, Any] = {
        "request_id": handoff_id.split("/")[0],
        "handoff_id": handoff_id,
        "attempt": 1,
        "capability": "",
        "tokens": tokens,
        "block_ids": tuple(chain(ROOT, tokens, P)),
        "root_id": ROOT,
        "have": 0,
        "arrival_unix_ns": 1,
    }
    return Order(**{**values, **changes})
