"""`kvmesh status`: every process, and what workers and KV stores say of themselves."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.cli.running import running_state, status_of
from mesh.cli.style import duration, table
from mesh.supervisor.probe import http_get
from mesh.telemetry.samples import Samples, parse_samples, total

PAGE_STATES = ("total", "free", "granted", "cached", "leased", "quarantined")
_ASK_S = 2.0


def run(arguments: argparse.Namespace) -> int:
    """0 when everything is ready, 1 when something is not, 3 when there is no mesh."""
    state = running_state(arguments.state)
    status = dict(status_of(state))
    token = state.metrics_token.read_text(encoding="ascii").strip()
    asyncio.run(_add_metrics(status["processes"], token))
    status["state_dir"] = str(state.root)
    print(json.dumps(status, indent=1) if arguments.json else _text(status))
    return 0 if status["ready"] else 1


async def _add_metrics(processes: list[dict[str, Any]], token: str) -> None:
    await asyncio.gather(*(_add_own(process, token) for process in processes if process["metrics_url"]))


async def _add_own(process: dict[str, Any], token: str) -> None:
    """Adds what a role is asked for; a process that does not answer lacks it."""
    worker, store = process["role"] in ("prefill", "decode"), process["role"] == "kvstore"
    if not (worker or store or process["role"] == "router"):
        return
    target, _, path = process["metrics_url"].removeprefix("http://").partition("/")
    try:
        async with asyncio.timeout(_ASK_S):
            code, body = await http_get(target, f"/{path}", {"authorization": f"Bearer {token}"})
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return
    if code != 200:
        return
    samples = parse_samples(body.decode())
    if store:
        process["pages"] = pages(samples)
        for name, labels, value in samples:
            if name == "kvmesh_kv_moved_blocks_total":
                way = f"{labels.get('way', '')}_blocks"
                process[way] = process.get(way, 0) + int(value)
        process["disk"] = disk(samples)
        process["invariant_violations"] = int(total(samples, "kvmesh_kv_invariant_violations"))
    else:
        process["running"] = int(total(samples, "kvmesh_num_requests_running"))
        process["waiting"] = int(total(samples, "kvmesh_num_requests_waiting"))


def pages(samples: Samples) -> dict[str, int]:
    """Pages by state, over all models."""
    found = dict.fromkeys(PAGE_STATES, 0)
    for name, labels, value in samples:
        if name == "kvmesh_kv_pages" and labels.get("state") in found:
            found[labels["state"]] += int(value)
    found["total"] = sum(found[state] for state in PAGE_STATES if state != "total")
    return found


def disk(samples: Samples) -> dict[str, int] | None:
    """Bytes of evicted blocks on disk; None where they are not kept."""
    found = {labels["kind"]: int(value) for name, labels, value in samples if name == "kvmesh_kv_disk_bytes"}
    return {**found, "failing": int(total(samples, "kvmesh_kv_disk_failing"))} if found else None


def _text(status: Mapping[str, Any]) -> str:
    rows = [_row(process) for process in status["processes"]]
    lines = [table(rows, ("NAME", "STATE", "PID", "UP", "WORK", "ADDRESS"))]
    lines += [f"\nedge   {status['edge_url'] or 'none (--no-edge)'}", f"key    {status['key_file']}"]
    lines += [f"model  {name} = {source}" for name, source in status["models"].items()]
    return "\n".join(lines)


def _row(process: Mapping[str, Any]) -> tuple[str, ...]:
    state = "ready" if process["ready"] else process["state"]
    if process["restarts"]:
        state += f" (restarted {process['restarts']}x)"
    work = ""
    if "pages" in process:
        held = process["pages"]
        work = f"{held['leased']} leased, {held['cached']} cached of {held['total']} pages"
        if (kept := process["disk"]) is not None:
            work += f", {kept['used'] >> 20} of {kept['limit'] >> 20} MiB on disk"
            work += "; THE DISK TAKES NOTHING" if kept["failing"] else ""
        if process["invariant_violations"]:
            work += f"; {process['invariant_violations']} BROKEN INVARIANTS"
    elif "running" in process:
        work = f"{process['running']} running, {process['waiting']} waiting"
    address = process["address"] or ""
    return (
        process["name"],
        state,
        str(process["pid"] or "-"),
        duration(process["uptime_s"]),
        work,
        address.replace(str(Path.cwd()) + "/", ""),
    )
