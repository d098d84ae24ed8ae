"""One supervised process: started, awaited until ready, restarted when it ends, replaced,
drained, stopped.

The first restart is immediate, the next ones wait longer, without end; a process that
stayed up for a while begins anew. Where two runs can work side by side, a replacement
is ready before the run it takes over from is asked to end. Does not know what the
process is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mesh.supervisor.logfile import LogFile
from mesh.supervisor.probe import Probe
from mesh.supervisor.status_file import read_status
from mesh.supervisor.sweep import start_time

_CHILD = Path(__file__).with_name("child.py")
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
# A process that was ready for so long has recovered from what made it end before.
_HEALTHY_AFTER_S = 3.0
# While a process starts, between two looks whether it is ready.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 0.25
# A started process that does not become ready is ended and tried again.
READY_WITHIN_S = 120.0


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. `prepare(taking_over)` runs in a thread before every start (files,
    certificates) and returns arguments of this start alone.

    `ready` tells when it can work, `alive` whether it still answers at all; `stop_s` is
    how long it may take to end after SIGTERM. `side_by_side`: a second run may begin
    while the first still works, and takes its place; then the first has `retire_s` to
    finish, after SIGTERM if `retire_by_signal`, else it ends by itself.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    ready: Probe
    alive: Probe
    log: Path
    address: str = ""
    status_file: Path | None = None
    model: str | None = None
    nice: int = 0
    stop_s: float = 10.0
    prepare: Callable[[bool], Sequence[str]] = lambda taking_over: ()
    side_by_side: bool = False
    retire_s: float = 600.0
    retire_by_signal: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


class Replaced(Exception):
    """The successor did not come up; the message says why. The run goes on."""


class Process:
    """Keeps one process running from `start` to `stop`."""

    def __init__(self, spec: ProcessSpec, on_change: Callable[[Process], None]) -> None:
        self.spec = spec
        self.state = State.STOPPED
        self.pid: int | None = None
        self.restarts = 0
        self.reason: str | None = None
        self.ready = asyncio.Event()
        self.log = LogFile(spec.log)
        self.began = time.monotonic()
        self._on_change = on_change
        self._failures = 0
        self._ready_at: float | None = None
        self._killed_for: str | None = None
        self._stopping = False
        self._skip_backoff = asyncio.Event()
        self._running: asyncio.subprocess.Process | None = None
        self._swapped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._retirees: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begins to keep it running."""
        self._stopping = False
        self.began = time.monotonic()
        self._task = asyncio.create_task(self._keep_running(), name=f"keep {self.spec.name}")

    @property
    def uptime_s(self) -> float:
        """Seconds since this run of it began; 0 when it does not run."""
        return time.monotonic() - self.began if self.pid is not None else 0.0

    @property
    def pids(self) -> list[int]:
        """The run and those it took over from, as long as they finish their work."""
        own = [self.pid] if self.pid is not None else []
        return [*own, *(run.pid for run in self._retirees)]

    @property
    def retiring(self) -> list[int]:
        return [run.pid for run in self._retirees]

    def kill(self, reason: str) -> None:
        """Ends a run that hangs; it is started again."""
        self._killed_for = reason
        self._signal(signal.SIGKILL)

    async def restart(self) -> None:
        """A successor takes over, where two runs can work side by side; else the run ends as
        gently as with `stop` and is started again at once. One that was drained is started.

        Raises Replaced when the successor does not come up; then nothing has changed.
        """
        running = self._running
        self._failures = 0
        self._skip_backoff.set()
        if self._task is None:
            self.start()
        elif running is None:
            return
        elif self.spec.side_by_side and self.ready.is_set():
            await self._take_over(running)
        else:
            self.ready.clear()
            self._enter(State.STOPPING, "asked to restart")
            await self._end(running, self.spec.stop_s)

    async def drain(self, within_s: float) -> None:
        """Ends the run when it has finished or moved its work, `within_s` at most; nothing
        follows it until `restart`."""
        await self._leave(within_s, State.DRAINED)

    async def stop(self, within_s: float | None = None) -> None:
        """Ends it for good: SIGTERM, then SIGKILL after `within_s`."""
        within_s = self.spec.stop_s if within_s is None else within_s
        if self._task is not None:
            await self._leave(within_s, State.STOPPED)
        # After the run: it may be what ends the one before it.
        for run, task in list(self._retirees.items()):
            task.cancel()
            await self._end(run, within_s)
        self._retirees.clear()
        self.log.close()

    async def retired(self) -> None:
        """Returns when no earlier run is left."""
        while self._retirees:
            await asyncio.wait(list(self._retirees.values()))

    async def _leave(self, within_s: float, state: State) -> None:
        self._stopping = True
        self._skip_backoff.set()
        if self._task is None:
            return
        self.ready.clear()
        self._enter(State.STOPPING)
        if self._running is not None:
            await self._end(self._running, within_s)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        self.pid = None
        self.reason = None
        self._enter(state)

    async def _keep_running(self) -> None:
        while not self._stopping:
            self._ready_at = None
            reason = await self._run_once()
            if self._ends():
                return
            self.reason = reason
            self.restarts += 1
            well_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            self._failures = 1 if well_s > _HEALTHY_AFTER_S else self._failures + 1
            pause_s = _BACKOFF_S[min(self._failures - 1, len(_BACKOFF_S) - 1)]
            self._enter(State.BACKOFF, reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._skip_backoff.wait()
            self._skip_backoff.clear()

    async def _run_once(self) -> str:
        """Runs it until it, or what took over from it, ends; why it ended."""
        self.ready.clear()
        self.began = time.monotonic()
        self.log.forget_tail()
        self._enter(State.STARTING)
        try:
            running, output = await self._launch(taking_over=False)
        except Exception as error:
            # Whatever keeps one process from starting must not stop the others.
            self.log.write(f"cannot be started: {error}\n".encode())
            return f"cannot be started: {error}"
        self._running, self.pid = running, running.pid
        self._enter(State.STARTING)
        waiting = asyncio.create_task(self._await_ready())
        try:
            status = await self._ended()
        finally:
            waiting.cancel()
        self._running = self.pid = None
        self.ready.clear()
        # Whoever inherited its standard output may keep that open.
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(1.0):
                await output
        return self._describe(status)

    async def _ended(self) -> int:
        """The status with which the run ended that nothing took over from."""
        while True:
            running = self._running
            assert running is not None
            ended, swapped = (
                asyncio.ensure_future(running.wait()),
                asyncio.ensure_future(self._swapped.wait()),
            )
            try:
                await asyncio.wait({ended, swapped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                swapped.cancel()
                if not ended.done():
                    ended.cancel()
            if self._running is running:
                return ended.result()
            self._swapped.clear()

    async def _launch(self, *, taking_over: bool) -> tuple[asyncio.subprocess.Process, asyncio.Task[None]]:
        more = await asyncio.to_thread(self.spec.prepare, taking_over)
        running = await self._spawn(more)
        return running, asyncio.create_task(self._copy_output(running))

    async def _take_over(self, old: asyncio.subprocess.Process) -> None:
        """A second run; when it is ready the first one retires beside it."""
        # A third one at a time would only add to what has to be understood.
        await self.retired()
        try:
            new, _ = await self._launch(taking_over=True)
        except Exception as error:
            raise Replaced(f"the successor of {self.spec.name} cannot be started: {error}") from error
        end = time.monotonic() + READY_WITHIN_S
        while (reason := await self._not_ready(new)) is not None:
            if new.returncode is not None or time.monotonic() > end:
                await self._end(new, 0.0)
                raise Replaced(f"the successor of {self.spec.name} is not ready: {reason}")
            await asyncio.sleep(_FIRST_LOOK_S)
        if self._running is not old:
            # It died meanwhile and has a successor already.
            await self._end(new, self.spec.stop_s)
            return
        self._running, self.pid, self.began = new, new.pid, time.monotonic()
        self._swapped.set()
        self._retirees[old] = asyncio.create_task(self._retire(old), name=f"retire {self.spec.name}")
        self.ready.set()
        self._enter(State.READY)

    async def _retire(self, old: asyncio.subprocess.Process) -> None:
        try:
            await self._end(old, self.spec.retire_s, ask=self.spec.retire_by_signal)
        finally:
            self._retirees.pop(old, None)
        self._on_change(self)

    async def _spawn(self, more: Sequence[str]) -> asyncio.subprocess.Process:
        wrapper = (sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), str(self.spec.nice))
        return await asyncio.create_subprocess_exec(
            *wrapper,
            *self.spec.argv,
            *more,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.spec.env},
            # Own group: Ctrl-C in a terminal is for the supervisor, which stops the
            # others in order. Same session: the scheduler weighs niceness within one.
            process_group=0,
        )

    async def _copy_output(self, running: asyncio.subprocess.Process) -> None:
        assert running.stdout is not None
        while data := await running.stdout.read(65536):
            self.log.write(data)

    async def _await_ready(self) -> None:
        end = time.monotonic() + READY_WITHIN_S
        look_s = _FIRST_LOOK_S
        while self._running is not None and (reason := await self._not_ready(self._running)) is not None:
            self.reason = reason
            if time.monotonic() > end:
                self.kill(f"not ready within {READY_WITHIN_S:g} s: {reason}")
                return
            await asyncio.sleep(look_s)
            look_s = min(look_s * 1.5, _LAST_LOOK_S)
        self.reason = None
        self._ready_at = time.monotonic()
        self.ready.set()
        self._enter(State.READY)

    async def _not_ready(self, running: asyncio.subprocess.Process) -> str | None:
        reason = await self.spec.ready()
        if reason is None and self.spec.status_file is not None:
            # Two runs side by side write one file: whose word is it?
            said = read_status(self.spec.status_file).get("pid")
            reason = None if said == running.pid else "it has not started yet"
        return reason

    async def _end(self, running: asyncio.subprocess.Process, within_s: float, *, ask: bool = True) -> None:
        pid = running.pid
        with contextlib.suppress(ProcessLookupError):
            if ask:
                running.send_signal(signal.SIGTERM)
            # A stopped process cannot end itself.
            running.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(within_s):
                await running.wait()
        except TimeoutError:
            if running is self._running:
                self._killed_for = f"did not end within {within_s:g} s of SIGTERM"
            with contextlib.suppress(ProcessLookupError):
                running.kill()
            await running.wait()
        _kill_group(pid)

    def _ends(self) -> bool:
        """Asked anew after every wait."""
        return self._stopping

    def _signal(self, number: signal.Signals) -> None:
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                self._running.send_signal(number)

    def _describe(self, status: int) -> str:
        given = f" ({self._killed_for})" if self._killed_for else ""
        self._killed_for = None
        if status < 0:
            return f"ended by {signal.Signals(-status).name}{given}"
        return f"ended with status {status}{given}"

    def _enter(self, state: State, reason: str | None = None) -> None:
        self.state = state
        if reason is not None:
            self.reason = reason
        self._on_change(self)


def is_stopped(pid: int) -> bool:
    """True for a process in the kernel's stopped state (SIGSTOP)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def cpu_ticks(pid: int) -> int | None:
    """Processor time used so far; None where that cannot be told."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return None


def _kill_group(pid: int) -> None:
    """What a process left in its group ends with it."""
    if start_time(pid) is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
