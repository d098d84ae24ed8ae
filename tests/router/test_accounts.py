"""What is left of a request: phases that add up, usage that survives, metrics, logs without text."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import logging
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmesh.v1 import iam_pb2

from mesh.telemetry import read_trace
from router.core import phases as phase
from router.core.phases import Phases
from router.core.usage import UsageOutbox
from tests.router.fakes import text_script
from tests.router.world import until, world


@given(st.lists(st.tuples(st.sampled_from(phase.BEFORE_FIRST_TOKEN), st.integers(0, 10**9)), max_size=20))
def test_phases_are_contiguous_and_sum_to_the_whole(steps: list[tuple[str, int]]) -> None:
    now = [1_000_000]
    phases = Phases(500_000, clock=lambda: now[0])
    for name, passed in steps:
        now[0] += passed
        phases.enter(name)
    now[0] += 5
    phases.enter(phase.DECODE)
    first = now[0]
    phases.enter(phase.QUEUE)
    now[0] += 7
    phases.finish()
    phases.finish()
    assert phases.visits[0].start_ns == 500_000
    assert all(a.end_ns == b.start_ns for a, b in zip(phases.visits, phases.visits[1:], strict=False))
    assert phases.total_s(*phase.BEFORE_FIRST_TOKEN) == pytest.approx((first - 500_000) / 1e9)
    assert phases.visits[-1].phase == phase.DECODE
    assert phases.visits[-1].end_ns == now[0]


async def test_one_trace_tells_where_the_time_went() -> None:
    async with world(decode=1, prefill=1) as mesh:
        mesh.worker.behaviour.have = lambda open_: 0
        mesh.worker.behaviour.step_s = 0.02
        headers = mesh.headers("trace-me")
        started = time.time() - 0.05
        headers["x-mesh-start"] = f"{started:.6f}"
        headers["traceparent"] = f"00-{'ab' * 16}-{'cd' * 8}-01"
        answer = await mesh.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": [97] * 40, "max_tokens": 3},
            headers=headers,
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "trace-me"
        mesh.runtime._tracing.flush()
        spans = read_trace(mesh.path, "trace-me")
        assert {span.trace_id for span in spans} == {"ab" * 16}
        by_name = {span.name: span for span in spans}
        whole = by_name["POST /v1/completions"]
        parts = [by_name[name] for name in phase.BEFORE_FIRST_TOKEN]
        assert whole.parent_id == "cd" * 8
        assert all(part.parent_id == whole.span_id for part in parts)
        first_token = by_name[phase.DECODE].start_ns
        total = sum(part.end_ns - part.start_ns for part in parts)
        assert total == first_token - parts[0].start_ns
        assert abs(parts[0].start_ns / 1e9 - started) < 1e-3
        assert mesh.worker.opened[0].traceparent.startswith(f"00-{'ab' * 16}-")


async def test_usage_is_recorded_once_and_prompts_are_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with world(decode=1, prefill=0) as mesh:
        kept: list[tuple[str, bytes]] = []

        async def publish(record: bytes, msg_id: str) -> bool:
            kept.append((msg_id, record))
            return True

        mesh.router.outbox._publish = publish
        canary = "xyzzy-canary"
        mesh.worker.behaviour.script = text_script(canary)
        headers = mesh.headers("r-42")
        body = {"model": "tiny", "messages": [{"role": "user", "content": canary}]}
        assert (await mesh.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        await until(lambda: kept)
        ((msg_id, record),) = kept
        usage = iam_pb2.UsageRecord.FromString(record)
        assert msg_id == usage.request_id == "r-42"
        assert (usage.organisation, usage.credential, usage.model_served) == ("acme", "k1", "tiny")
        assert usage.completion_tokens == len(canary) + 1
        assert usage.outcome == "ok"
        await mesh.chat(n=0)
        await mesh.post("/v1/completions", {"model": "none", "prompt": canary})
        assert len(kept) == 1
        lines = [record for record in caplog.records if record.name == "router.request"]
        assert [getattr(line, "outcome", None) for line in lines] == [
            "ok", "integer_below_min_value", "model_not_found",
        ]  # fmt: skip
        mesh.runtime._tracing.flush()
        for path in mesh.path.rglob("*"):
            if path.is_file():
                assert canary not in path.read_text(errors="replace"), path
        assert canary not in " ".join(str(vars(record)) for record in caplog.records)
        sample = mesh.runtime.registry.get_sample_value
        assert sample("kvmesh_requests_total", {"model": "tiny", "outcome": "ok"}) == 1
        assert sample("kvmesh_time_to_first_token_seconds_count", {"model": "tiny"}) == 1
        assert sample("kvmesh_num_requests_running", {"model": "tiny"}) == 0
        assert sample("kvmesh_num_requests_waiting", {"model": "tiny"}) == 0


async def test_the_outbox_keeps_what_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.core.usage.LOOK_S", 0.0)
    there = False
    stored: list[str] = []

    async def publish(record: bytes, msg_id: str) -> bool:
        if there:
            stored.append(f"{msg_id}={record.decode()}")
        return there

    family = tmp_path / "outbox" / "r.usage"
    outbox = UsageOutbox(family, publish)
    await outbox.start()
    [path] = family.parent.iterdir()
    outbox.add("a", b"1")
    outbox.add("b", b"2")
    await until(lambda: path.exists() and path.read_bytes().count(b"\n") == 2)
    await outbox.close()
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(b"half a li")
    # As if another process had left it, and one more that lives and one of another router.
    path = path.rename(family.with_name("r.1.usage"))
    alive, other = family.with_name("r.2.usage"), family.with_name("r.x.3.usage")
    for foreign in (alive, other):
        foreign.write_bytes(path.read_bytes())
    held = os.open(alive, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    again = UsageOutbox(family, publish)
    await again.start()
    assert again.pending == 2
    assert alive.exists()
    assert other.exists()
    assert not path.exists()
    path = family.with_name(f"r.{os.getpid()}.usage")
    assert path.read_bytes().count(b"\n") == 2
    await asyncio.sleep(0)
    there = True
    await again.retry()
    await until(lambda: stored == ["a=1", "b=2"])
    await until(lambda: path.read_bytes() == b"")
    again.add("c", b"3")
    await until(lambda: stored[-1] == "c=3" and path.read_bytes() == b"")
    # One that ends after its successor began: what it left is taken up with the next record.
    os.close(held)
    again.add("d", b"4")
    await until(lambda: sorted(stored[3:]) == ["a=1", "b=2", "d=4"])
    assert not alive.exists()
    # And without a next record: while a predecessor lives it is looked for.
    monkeypatch.setattr("router.core.usage.LOOK_AGAIN_S", 0.02)
    alive.write_bytes(b"late " + base64.b64encode(b"5") + b"\n")
    held = os.open(alive, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    again.add("e", b"6")
    await until(lambda: stored[-1] == "e=6" and again.pending == 0)
    os.close(held)
    await until(lambda: stored[-1] == "late=5")
    assert not alive.exists()
    await again.close()
    assert not path.exists()
