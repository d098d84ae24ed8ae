"""How fast any OpenAI-compatible server is, under a load that you choose.

Streams completions of prompts that share no prefix. Closed loop (default): --concurrency clients, each
sends its next request when the last is answered. Open loop: --rate requests per second, arriving as a
Poisson process whether or not the server keeps up; latencies count from the arrival.

  out_tok_s, prompt_tok_s     tokens per second of the whole run, as the server's usage counts them
  ttft_p50_ms, ttft_p99_ms    until the first text
  itl_p50_ms, itl_p99_ms      between two pieces of text of one stream
  tpot_p50_ms                 mean time per piece, of the median request
  goodput_req_s               requests per second that kept the objective: --slo-ttft-ms and --slo-itl-ms
                              (each request's p99 between pieces); slo_met_pct of all
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from bench.command import BenchError, Row
from bench.sse_client import Sample, Target, stream

# Common ones: about one token each, in most vocabularies.
# fmt: off
WORDS = (
    "time", "people", "water", "house", "world", "school", "family", "number", "story", "money",
    "music", "paper", "road", "town", "field", "light", "week", "night", "power", "table",
    "student", "country", "problem", "letter", "mother", "father", "morning", "minute", "reason",
    "result", "member", "question",
)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="such as http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="the name that the server knows it by")
    parser.add_argument("--key", default="", help="an API key (default $KVMESH_API_KEY)")
    parser.add_argument("--ca", metavar="FILE", help="who is trusted, for https (PEM)")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", "-c", type=int, default=8, help="clients of a closed loop (default 8)")
    load.add_argument("--rate", type=float, help="requests per second of an open loop")
    parser.add_argument("--requests", "-n", type=int, default=32, help="how many in all (default 32)")
    parser.add_argument("--input-words", type=int, default=256, help="words of a prompt (default 256)")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--warm", type=int, default=2, help="requests before the clock starts (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one request (default 600)")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="default 1000")
    parser.add_argument("--slo-itl-ms", type=float, default=100.0, help="default 100")


def run(arguments: argparse.Namespace) -> Row:
    for name in ("concurrency", "requests", "input_words", "output_tokens"):
        if getattr(arguments, name) < 1:
            raise BenchError(f"--{name.replace('_', '-')}: at least 1")
    if arguments.rate is not None and arguments.rate <= 0:
        raise BenchError("--rate: above 0")
    return asyncio.run(_measure(arguments))


async def _measure(arguments: argparse.Namespace) -> Row:
    path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
    key = arguments.key or os.environ.get("KVMESH_API_KEY", "")
    target = Target.parse(arguments.url, path=path, key=key, ca=arguments.ca)
    load = _Load(target, arguments)
    for number in range(arguments.warm):
        sample = await load.send(-1 - number, time.perf_counter())
        if sample.error is not None:
            raise BenchError(f"the server does not answer as it should: {sample.error}")
    start = time.perf_counter()
    if arguments.rate is None:
        samples = await load.closed(arguments.concurrency)
        shape = f"closed, {arguments.concurrency} clients"
    else:
        samples = await load.opened(arguments.rate)
        shape = f"open, {arguments.rate:g} requests a second"
    wall_s = max((sample.end_s for sample in samples), default=start) - start
    return {
        "url": arguments.url,
        "model": arguments.model,
        "load": shape,
        **summary(samples, wall_s, arguments),
    }


class _Load:
    def __init__(self, target: Target, arguments: argparse.Namespace) -> None:
        self._target = target
        self._arguments = arguments

    async def closed(self, clients: int) -> list[Sample]:
        numbers = iter(range(self._arguments.requests))
        samples: list[Sample] = []

        async def client() -> None:
            for number in numbers:
                sample = await self.send(number, time.perf_counter())
                samples.append(sample)

        await asyncio.gather(*(client() for _ in range(clients)))
        return samples

    async def opened(self, rate: float) -> list[Sample]:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, after_s in enumerate(arrivals(rate, self._arguments.requests, self._arguments.seed)):
                await asyncio.sleep(begin + after_s - time.perf_counter())
                tasks.append(group.create_task(self.send(number, begin + after_s)))
        return [task.result() for task in tasks]

    async def send(self, number: int, due_s: float) -> Sample:
        sample = Sample(due_s)
        await stream(self._target, self._body(number), sample, self._arguments.timeout_s)
        return sample

    def _body(self, number: int) -> dict[str, Any]:
        text = prompt(self._arguments.seed, number, self._arguments.input_words)
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if self._arguments.chat else {"prompt": text}
        )
        return asked | {
            "model": self._arguments.model,
            "max_tokens": self._arguments.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def prompt(seed: int, number: int, words: int) -> str:
    """Begins with a number of its own, so that no server finds a prefix that it knows."""
    draw = random.Random(f"{seed}/{number}")  # noqa: S311 — repeatable on purpose
    return " ".join([str(draw.random()), *draw.choices(WORDS, k=words)])


def arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Seconds after the start, of a Poisson process: exponential gaps."""
    draw = random.Random(f"arrivals/{seed}")  # noqa: S311
    at = 0.0
    for _ in range(count):
        yield at
        at += draw.expovariate(rate)


def summary(samples: Sequence[Sample], wall_s: float, arguments: argparse.Namespace) -> dict[str, object]:
    good = [sample for sample in samples if sample.error is None]
    ttft = [(s.stamps_s[0] - s.due_s) * 1e3 for s in good if s.stamps_s]
    gaps = [gaps_ms(s) for s in good]
    itl = [gap for each in gaps for gap in each]
    tpot = [sum(each) / len(each) for each in gaps if each]
    kept = sum(
        bool(s.stamps_s)
        and (s.stamps_s[0] - s.due_s) * 1e3 <= arguments.slo_ttft_ms
        and percentile(each or [0.0], 99) <= arguments.slo_itl_ms
        for s, each in zip(good, gaps, strict=True)
    )
    row: dict[str, object] = {
        "requests_ok": len(good),
        "requests_failed": len(samples) - len(good),
        "first_error": next((s.error for s in samples if s.error is not None), None),
        "wall_s": wall_s,
        "prompt_tokens": sum(s.prompt_tokens for s in good),
        "completion_tokens": sum(s.completion_tokens or len(s.stamps_s) for s in good),
    }
    row |= {
        "out_tok_s": sum(s.completion_tokens or len(s.stamps_s) for s in good) / wall_s,
        "prompt_tok_s": sum(s.prompt_tokens for s in good) / wall_s,
        "req_s": len(good) / wall_s,
    }
    for name, values in (("ttft", ttft), ("itl", itl), ("tpot", tpot)):
        if values:
            row |= {f"{name}_p{p}_ms": percentile(values, p) for p in (50, 90, 99)}
            row[f"{name}_max_ms"] = max(values)
    row |= {
        "slo_ttft_ms": arguments.slo_ttft_ms,
        "slo_itl_ms": arguments.slo_itl_ms,
        "slo_met_pct": 100 * kept / len(samples),
        "goodput_req_s": kept / wall_s,
    }
    return row


def gaps_ms(sample: Sample) -> list[float]:
    stamps = sample.stamps_s
    return [(later - earlier) * 1e3 for earlier, later in pairwise(stamps)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: a value that was measured."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))]
