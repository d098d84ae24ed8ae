"""The load against a server that answers as it is told: what is counted, and that nothing is smoothed over."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from bench.command import BenchError
from bench.serve import arrivals, percentile, prompt
from tests.bench.fake_server import FakeServer


@contextlib.asynccontextmanager
async def served(**answer: Any) -> AsyncIterator[FakeServer]:
    async with FakeServer(**answer) as server:
        yield server


async def measured(server: FakeServer, *words: str) -> dict[str, Any]:
    import argparse

    from bench import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(["--url", server.url, "--model", "m", "--warm", "0", *words])
    # As a user runs it: in a loop of its own.
    return dict(await asyncio.to_thread(serve.run, arguments))


async def test_a_closed_loop_keeps_its_clients_and_counts_usage() -> None:
    async with served(tokens=4, gap_s=0.01) as server:
        row = await measured(server, "-c", "3", "-n", "9", "--key", "sk-1", "--output-tokens", "4")
    assert row["requests_ok"] == 9
    assert server.most_at_once == 3
    assert row["completion_tokens"] == 9 * 4
    assert row["prompt_tokens"] == 9 * 11
    assert row["out_tok_s"] == pytest.approx(36 / row["wall_s"])
    assert 9 < row["itl_p50_ms"] < 500
    bodies = server.bodies
    assert len({body["prompt"] for body in bodies}) == 9
    assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] == 4 for body in bodies)
    assert server.heads[0]["authorization"] == "Bearer sk-1"


async def test_an_open_loop_does_not_wait_for_the_server() -> None:
    async with served(tokens=2, first_s=0.3) as server:
        row = await measured(server, "--rate", "200", "-n", "12")
    assert row["requests_ok"] == 12
    assert server.most_at_once > 6
    assert row["ttft_p50_ms"] >= 300


async def test_goodput_counts_who_kept_the_objective() -> None:
    async with served(tokens=3, first_s=0.05, slow_every=2, slow_s=0.4) as server:
        row = await measured(server, "-c", "1", "-n", "6", "--slo-ttft-ms", "300", "--slo-itl-ms", "300")
    assert row["slo_met_pct"] == pytest.approx(50)
    assert row["goodput_req_s"] == pytest.approx(3 / row["wall_s"])


async def test_chat_speaks_chat() -> None:
    async with served(tokens=2) as server:
        row = await measured(server, "--chat", "-n", "2")
    assert row["requests_ok"] == 2
    assert server.heads[0]["path"] == "/v1/chat/completions"
    assert server.bodies[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": 429}, "429"),
        ({"tokens": 2, "broken": True}, "without [DONE]"),
        ({"tokens": 2, "failing": True}, "out of luck"),
    ],
)
async def test_failures_are_figures(answer: dict[str, Any], reason: str) -> None:
    async with served(**answer) as server:
        row = await measured(server, "-n", "2", "-c", "1")
    assert row["requests_ok"] == 0
    assert row["requests_failed"] == 2
    assert reason in row["first_error"]


async def test_a_server_that_refuses_the_first_ends_it() -> None:
    async with served(status=401) as server:
        with pytest.raises(BenchError, match="401"):
            await measured(server, "--warm", "1")


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(50.0, 4000, seed=2))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)
    assert times == list(arrivals(50.0, 4000, seed=2))


def test_percentiles_are_values_that_were_measured() -> None:
    values: Sequence[float] = [5.0, 1.0, 3.0]
    assert [percentile(values, p) for p in (0, 50, 100)] == [1.0, 3.0, 5.0]


def test_prompts_differ_from_the_first_word_on() -> None:
    assert prompt(1, 2, 5) == prompt(1, 2, 5)
    assert prompt(1, 2, 5).split()[0] != prompt(1, 3, 5).split()[0]
    assert len(json.dumps(prompt(1, 2, 5)).split()) == 6
