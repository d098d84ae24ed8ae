"""Requests that a broken mesh must answer as a whole one does, and what came of each.

Every kind that a continuation could get wrong: greedy and seeded, several choices,
log-probabilities, stop strings, penalties, streamed and plain. Knows the OpenAI
face, nothing of the mesh.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

_KINDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 11, "n": 2},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "stop": ["e", "42"]},
    {"temperature": 0.7, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz     0123456789"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `stream` is how it is asked the first time."""

    body: Mapping[str, Any]
    stream: bool


@dataclass(slots=True)
class Outcome:
    """`kind`: answered, refused (an error was told), broken (the connection ended), short (a stream
    that ended as if it were whole). `choices` by index: text, reason, log-probabilities."""

    kind: str
    detail: str = ""
    choices: dict[int, tuple[str, str | None, tuple[Any, ...]]] = field(default_factory=dict)
    tokens: int = 0
    longest_silence_s: float = 0.0
    seconds: float = 0.0

    @property
    def said(self) -> object:
        """What must be the same whenever the request is asked."""
        return self.choices, self.tokens


def draw(name: str, count: int, model: str, *, tokens: int = 48) -> list[Ask]:
    """`count` requests that nobody asked before under another `name`."""
    dice = random.Random(name)  # noqa: S311
    asks = []
    for number in range(count):
        length = dice.choice((12, 40, 90, 200, 380))
        prompt = f"{name} {number} " + "".join(dice.choice(_LETTERS) for _ in range(length))
        kind = _KINDS[number % len(_KINDS)]
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **kind}
        asks.append(Ask(body, stream=dice.random() < 0.6))
    return asks


async def put(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    """Asks once. Never raises for what the mesh does."""
    began = time.monotonic()
    try:
        outcome = await (_streamed(client, ask) if ask.stream else _plain(client, ask))
    except httpx.HTTPError as error:
        outcome = Outcome("broken", f"{type(error).__name__} {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


async def _plain(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    began = time.monotonic()
    answer = await client.post("/v1/completions", json=dict(ask.body))
    if answer.status_code != 200:
        return Outcome("refused", f"{answer.status_code} {answer.text[:160]}")
    document = answer.json()
    outcome = Outcome("answered", tokens=document["usage"]["completion_tokens"])
    for choice in document["choices"]:
        logprobs = tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())
        outcome.choices[choice["index"]] = (choice["text"], choice["finish_reason"], logprobs)
    outcome.longest_silence_s = time.monotonic() - began
    return outcome


async def _streamed(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    outcome = Outcome("short")
    body = {**ask.body, "stream": True, "stream_options": {"include_usage": True}}
    last = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return Outcome("refused", f"{answer.status_code} {(await answer.aread())[:160]!r}")
        async for line in answer.aiter_lines():
            now = time.monotonic()
            outcome.longest_silence_s = max(outcome.longest_silence_s, now - last)
            last = now
            if line == "data: [DONE]":
                outcome.kind = "answered"
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    outcome.kind, outcome.detail = "refused", str(event["error"])[:160]
                    return outcome
                _add(outcome, event)
    return outcome


def _add(outcome: Outcome, event: Mapping[str, Any]) -> None:
    if event.get("usage"):
        outcome.tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices", ()):
        text, reason, logprobs = outcome.choices.get(choice["index"], ("", None, ()))
        more = tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())
        outcome.choices[choice["index"]] = (
            text + choice["text"],
            choice["finish_reason"] or reason,
            logprobs + more,
        )
