"""Turns a hang into a death.

Three signs are looked at, none of them by polling fast: the kernel's word that a
child was stopped (SIGCHLD), a heartbeat on the news that stays away, and a router
that suspects a worker. Only the first ends a process on its own; after the other two
it is asked whether it answers. What sends no heartbeats is asked now and then.

A process that does not answer but is using the processor is slow, not dead: it gets
longer. Does not know how heartbeats travel: `heard` and `suspect` are called.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import Callable, Mapping

from mesh.supervisor.process import Process, State, cpu_ticks, is_stopped

HEARTBEAT_LIMIT_S = 12.0
ASK_EVERY_S = 10.0
# A stopped process may be continued by whoever stopped it.
STOPPED_GRACE_S = 0.5
# One that computes but does not answer.
SLOW_LIMIT_S = 20.0


class HangWatch:
    """Watches the processes that `processes` yields at the time; `start` to `close`."""

    def __init__(self, processes: Callable[[], Mapping[str, Process]], report: Callable[[str], None]) -> None:
        self._processes = processes
        self._report = report
        self._heard: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._round: asyncio.Task[None] | None = None
        self._stopped_checks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._child_changed)
        self._round = asyncio.create_task(self._rounds(), name="hang watch")

    async def close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        tasks = [
            t for t in (self._round, *self._asking.values(), *self._stopped_checks.values()) if t is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def heard(self, name: str) -> None:
        """A heartbeat of that process has arrived."""
        self._heard[name] = time.monotonic()

    def suspect(self, name: str) -> None:
        """Somebody waits for that process in vain: ask it now."""
        process = self._processes().get(name)
        if process is not None and process.state is State.READY:
            self._ask(process, "a router waits for it in vain")

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            now = time.monotonic()
            for name, process in self._processes().items():
                if process.state is not State.READY:
                    continue
                heard = self._heard.get(name)
                if heard is None or heard < process.began:
                    self._ask(process, "it does not answer")
                elif now - heard > HEARTBEAT_LIMIT_S:
                    self._ask(process, f"no heartbeat for {now - heard:.0f} s")

    def _ask(self, process: Process, why: str) -> None:
        name = process.spec.name
        if name in self._asking or process.pid is None:
            return
        task = asyncio.create_task(self._judge(process, process.pid, why), name=f"ask {name}")
        self._asking[name] = task
        task.add_done_callback(lambda _: self._asking.pop(name, None))

    async def _judge(self, process: Process, pid: int, why: str) -> None:
        end = time.monotonic() + SLOW_LIMIT_S
        while True:
            before = cpu_ticks(pid)
            reason = await process.spec.alive()
            if reason is None or process.pid != pid:
                return
            busy = before is not None and cpu_ticks(pid) != before and not is_stopped(pid)
            if not busy or time.monotonic() > end:
                break
        self._report(f"{process.spec.name} (pid {pid}) hangs: {why}; {reason}")
        process.kill(f"hung: {why}; {reason}")

    def _child_changed(self) -> None:
        for name, process in self._processes().items():
            pid = process.pid
            if pid is not None and name not in self._stopped_checks and is_stopped(pid):
                task = asyncio.create_task(self._end_if_still_stopped(process, pid))
                self._stopped_checks[name] = task
                task.add_done_callback(functools.partial(self._forget_check, name))

    def _forget_check(self, name: str, _: asyncio.Task[None]) -> None:
        self._stopped_checks.pop(name, None)

    async def _end_if_still_stopped(self, process: Process, pid: int) -> None:
        began = time.monotonic()
        await asyncio.sleep(STOPPED_GRACE_S)
        if time.monotonic() - began > 2 * STOPPED_GRACE_S:
            # This process was stopped as well (a whole session put to sleep): a second chance.
            await asyncio.sleep(STOPPED_GRACE_S)
        if process.pid == pid and is_stopped(pid):
            self._report(f"{process.spec.name} (pid {pid}) was stopped for {STOPPED_GRACE_S:g} s")
            process.kill("hung: stopped by a signal")
