"""Keeps a guardian beside the supervisor: see `guardian`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from mesh.supervisor.state import StateDir

_GUARDIAN = Path(__file__).with_name("guardian.py")
_GONE_WITHIN_S = 3.0
_RESTART_PAUSE_S = 1.0


class Guardian:
    """Runs the guardian from `start` to `dismiss`, and again if somebody ends it."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self._process = await self._spawn()
        self._task = asyncio.create_task(self._keep(), name="guardian")

    async def dismiss(self) -> None:
        """Tells it that everything is clean, and waits until it has gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.write(b"done\n")
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_WITHIN_S):
                await process.wait()

    async def _keep(self) -> None:
        while self._process is not None:
            await self._process.wait()
            await asyncio.sleep(_RESTART_PAUSE_S)
            self._process = await self._spawn()

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(_GUARDIAN),
            str(self._state.root),
            str(self._state.run),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        # From here on no signal that is meant for a session ends it.
        await process.stdout.readline()
        return process
