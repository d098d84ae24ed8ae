"""Requests for tests: correct ones, made from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.opening import Limits, Opening
from engine.sampling import SamplingParams
from mesh.blocks import chain

ROOT = bytes(range(16))
P = 16
LIMITS = Limits(page_tokens=P, pages=64, context_length=512, vocab_size=272, max_seqs=8, step_tokens=64)


def opening(tokens: Sequence[int], handoff_id: str = "r/0", **changes: Any) -> Opening:
    prefix = list(tokens[: (len(tokens) - 1) // P * P])
    values: dict[str, Any] = {
        "request_id": handoff_id.split("/")[0],
        "handoff_id": handoff_id,
        "attempt": 0,
        "capability": "",
        "tokens": tuple(tokens),
        "generated": 0,
        "block_ids": tuple(chain(ROOT, prefix, P)),
        "root_id": ROOT,
        "n": 1,
        "first_choice": 0,
        "sampling": SamplingParams(temperature=0.0),
        "max_tokens": 20,
        "min_tokens": 0,
        "stop_ids": frozenset(),
        "arrival_unix_ns": 1,
        "metadata": {},
        "credit": None,
    }
    return Opening(**{**values, **changes})
