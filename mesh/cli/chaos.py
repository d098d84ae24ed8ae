"""`kvmesh chaos`: breaks a test mesh in every way, and shows what its clients saw.

Only on a mesh that was started with `up --fault-points`: it kills processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import httpx

from mesh.chaos.cells import CONTROL, matrix
from mesh.chaos.run import Chaos, Result
from mesh.chaos.view import View
from mesh.cli.chat import trust
from mesh.cli.failure import NOT_RUNNING, Failure
from mesh.cli.running import running_state, status_of
from mesh.cli.style import table
from mesh.supervisor.state import StateDir

_HEADER = (
    "CELL",
    "REQUESTS",
    "DEATHS",
    "FAILED",
    "BROKEN STREAMS",
    "IDENTICAL",
    "SILENCE",
    "STALL",
    "RECOMPUTED",
    "LEAKED",
    "CLEAN AFTER",
)


def run(arguments: argparse.Namespace) -> int:
    """0 if no request failed, no answer differed and no page leaked."""
    state = running_state(arguments.state)
    status = status_of(state)
    if not status.get("fault_points"):
        raise Failure("this mesh has no fault points; a mesh for tests has: kvmesh up --fault-points")
    if not status["edge_url"]:
        raise Failure("this mesh runs with --no-edge: chaos needs the edge", status=NOT_RUNNING)
    cells = matrix(arguments.cell)
    if not cells:
        raise Failure(f"no cell is named {', '.join(arguments.cell)}; one is kill:decode:streaming", status=2)
    report = asyncio.run(_run(state, status, arguments, cells))
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print(_memory(report["memory_kib"]))
    return 0 if report["well"] else 1


async def _run(state: StateDir, status: Mapping[str, Any], arguments: Any, cells: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {state.dev_key.read_text(encoding='ascii').strip()}"}
    verify = trust(state)

    def connect() -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=status["edge_url"], headers=headers, verify=verify, timeout=httpx.Timeout(120.0)
        )

    view = View(state)
    model = arguments.model or next(iter(status["models"]))
    chaos = Chaos(view, connect, model, arguments.seed or secrets.token_hex(4))
    began = time.monotonic()
    before = await view.memory_kib()
    results: list[Result] = []
    if not arguments.json:
        print(_line(_HEADER), flush=True)
    for cell in (CONTROL, *cells):
        results.append(await chaos.cell(cell, arguments.requests))
        if not arguments.json:
            print(_line(_row(results[-1])), flush=True)
            for detail in results[-1].details[:5]:
                print(f"    {detail}", flush=True)
    after = await view.memory_kib()
    return {
        "requests": sum(result.requests for result in results),
        "seconds": round(time.monotonic() - began, 1),
        "well": not any(r.failed or r.different or r.leaked_pages for r in results),
        "cells": [{**asdict(r), "identical": r.identical} for r in results],
        "memory_kib": {
            name: {"before": before[name][1], "after": kib, "same_process": before[name][0] == pid}
            for name, (pid, kib) in after.items()
            if name in before
        },
    }


def _row(result: Result) -> tuple[str, ...]:
    recomputed = f"{result.recomputed_mean:.1f} x {result.resumed}" if result.resumed else "-"
    return (
        result.cell,
        str(result.requests),
        str(result.deaths),
        str(result.failed),
        str(result.broken_streams),
        str(result.identical),
        f"{result.silence_s:.2f} s",
        f"{result.stall_s:.2f} s",
        recomputed,
        str(result.leaked_pages),
        f"{result.clean_s:.1f} s",
    )


def _line(columns: tuple[str, ...]) -> str:
    widths = (28, 8, 6, 6, 14, 9, 7, 7, 12, 6, 11)
    return "  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip()


def _memory(memory: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (
            name,
            f"{said['before'] / 1024:.1f}",
            f"{said['after'] / 1024:.1f}",
            "" if said["same_process"] else "another process",
        )
        for name, said in memory.items()
    ]
    return "\n" + table(rows, ("NAME", "MiB BEFORE", "MiB AFTER", ""))
