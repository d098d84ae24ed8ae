"""One supervised process, with small programs in place of services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.supervisor.logfile import LogFile
from mesh.supervisor.probe import GreetingProbe, HttpProbe
from mesh.supervisor.process import Process, ProcessSpec, Replaced, State, is_stopped
from mesh.supervisor.sweep import start_time
from mesh.supervisor.watch import HangWatch

SLEEP = "import time; time.sleep(600)"
WITHIN_S = 20.0


class Always:
    """A probe with a fixed answer."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.asked = 0

    async def __call__(self) -> str | None:
        self.asked += 1
        return self.reason


class Changes:
    """Collects what a process reports, and waits for it."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self._news = asyncio.Event()

    def __call__(self, process: Process) -> None:
        self.states.append(process.state)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


async def eventually(condition: Callable[[], bool]) -> None:
    """For what nothing tells of."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def spec(tmp_path: Path) -> ProcessSpec:
    return ProcessSpec(
        name="dummy-0",
        role="decode",
        argv=(sys.executable, "-I", "-c", SLEEP),
        ready=Always(),
        alive=Always(),
        log=tmp_path / "dummy-0.log",
        nice=3,
    )


@pytest.fixture
async def started() -> AsyncIterator[Callable[[ProcessSpec], tuple[Process, Changes]]]:
    running: list[Process] = []

    def start(spec: ProcessSpec) -> tuple[Process, Changes]:
        changes = Changes()
        process = Process(spec, changes)
        running.append(process)
        process.start()
        return process, changes

    yield start
    for process in running:
        await process.stop(within_s=0.1)


Started = Callable[[ProcessSpec], tuple[Process, Changes]]


def scripted(spec: ProcessSpec, code: str) -> ProcessSpec:
    return replace(spec, argv=(sys.executable, "-I", "-c", code))


async def test_it_runs_with_its_priority_in_this_session_and_its_own_group(
    spec: ProcessSpec, started: Started
) -> None:
    process, _ = started(scripted(spec, f"print('up', flush=True); {SLEEP}"))
    await eventually(lambda: bool(process.log.tail()))
    assert process.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid


async def test_a_killed_process_is_replaced_at_once(spec: ProcessSpec, started: Started) -> None:
    process, changes = started(spec)
    await changes.until(process.ready.is_set)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await changes.until(lambda: State.BACKOFF in changes.states)
    assert "SIGKILL" in (process.reason or "")
    await changes.until(lambda: process.ready.is_set() and process.pid != first)
    assert process.restarts == 1


async def test_a_crash_loop_is_tried_again_and_its_words_are_kept(
    spec: ProcessSpec, started: Started
) -> None:
    crashing = scripted(replace(spec, ready=Always("no")), "print('no such weights'); raise SystemExit(7)")
    process, changes = started(crashing)
    await changes.until(lambda: process.restarts >= 2)
    assert process.reason == "ended with status 7"
    await process.stop()
    assert spec.log.read_text().count("no such weights") >= 2


async def test_what_cannot_be_prepared_is_reported_and_tried_again(
    spec: ProcessSpec, started: Started
) -> None:
    tries: list[int] = []

    def prepare(taking_over: bool) -> tuple[str, ...]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("the disk is full")
        return ()

    process, changes = started(replace(spec, prepare=prepare))
    await changes.until(process.ready.is_set)
    assert "the disk is full" in spec.log.read_text()


async def test_stop_asks_first_and_then_insists(spec: ProcessSpec, started: Started) -> None:
    deaf = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    process, changes = started(scripted(spec, deaf))
    await changes.until(process.ready.is_set)
    await eventually(lambda: bool(process.log.tail()))
    pid = process.pid
    assert pid is not None
    await process.stop(within_s=0.2)
    assert start_time(pid) is None
    assert process.state is State.STOPPED


async def test_a_restart_that_was_asked_for_is_immediate(spec: ProcessSpec, started: Started) -> None:
    process, changes = started(spec)
    await changes.until(process.ready.is_set)
    first = process.pid
    await process.restart()
    await changes.until(lambda: process.ready.is_set() and process.pid != first)


@contextlib.asynccontextmanager
async def watched(process: Process) -> AsyncIterator[HangWatch]:
    watch = HangWatch(lambda: {process.spec.name: process}, lambda _: None)
    watch.start()
    try:
        yield watch
    finally:
        await watch.close()


async def test_a_stopped_process_is_replaced(spec: ProcessSpec, started: Started) -> None:
    process, changes = started(spec)
    async with watched(process):
        await changes.until(process.ready.is_set)
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        await changes.until(lambda: process.ready.is_set() and process.pid != first)
        assert start_time(first) is None


async def test_one_that_is_continued_in_time_is_left_alone(spec: ProcessSpec, started: Started) -> None:
    process, changes = started(spec)
    async with watched(process):
        await changes.until(process.ready.is_set)
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: is_stopped(pid))
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(2.0)
        assert process.pid == pid
        assert process.restarts == 0


async def test_a_suspect_that_does_not_answer_is_replaced(spec: ProcessSpec, started: Started) -> None:
    process, changes = started(replace(spec, alive=Always("no answer")))
    async with watched(process) as watch:
        await changes.until(process.ready.is_set)
        first = process.pid
        watch.suspect("dummy-0")
        await changes.until(lambda: process.ready.is_set() and process.pid != first)
        assert State.BACKOFF in changes.states


async def test_a_suspect_that_answers_or_is_unknown_is_left_alone(
    spec: ProcessSpec, started: Started
) -> None:
    alive = Always()
    process, changes = started(replace(spec, alive=alive))
    async with watched(process) as watch:
        await changes.until(process.ready.is_set)
        watch.suspect("dummy-0")
        watch.suspect("nobody-7")
        await eventually(lambda: alive.asked > 0)
        assert process.restarts == 0


def test_a_log_is_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", limit_bytes=1000, kept=2)
    for number in range(100):
        log.write(f"line {number} {'x' * 40}\n".encode())
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["x.log", "x.log.1", "x.log.2"]
    assert all(f.stat().st_size < 1100 for f in files)
    assert log.tail(1) == ["line 99 " + "x" * 40]
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in files)


async def test_probes_tell_a_server_from_silence(tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\n")
        await writer.drain()
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 5\r\n\r\nfirst")
        await writer.drain()
        writer.close()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    path = tmp_path / "s"
    target = f"unix:{path}"
    for serve, probe, expected in (
        (greet, GreetingProbe(target, b"INFO "), None),
        (nothing, GreetingProbe(target, b"INFO ", timeout_s=0.1), "no answer"),
        (answer, HttpProbe(target, "/", statuses=(503,)), None),
        (answer, HttpProbe(target, "/"), "answered 503: first"),
        (nothing, HttpProbe(target, "/", timeout_s=0.1), "no answer"),
        (greet, HttpProbe(target, "/"), target),
    ):
        server = await asyncio.start_unix_server(serve, path)
        reason = await probe()
        server.close()
        await asyncio.sleep(0)
        path.unlink(missing_ok=True)
        assert reason is None if expected is None else expected in (reason or "")
    assert await HttpProbe(target, "/")() is not None


READY_BY_FILE = "import os, sys, time, json; json.dump({'pid': os.getpid()}, open(sys.argv[1], 'w')); "


async def test_a_successor_is_ready_before_the_run_that_it_replaces_ends(
    spec: ProcessSpec, started: Started, tmp_path: Path
) -> None:
    status, gone = tmp_path / "status.json", tmp_path / "gone"
    code = (
        READY_BY_FILE + "import signal; "
        f"signal.signal(15, lambda *_: (time.sleep(0.5), open({str(gone)!r}, 'w').close(), os._exit(0))); "
        "time.sleep(600)"
    )
    takes: list[bool] = []

    def prepare(taking_over: bool) -> tuple[str, ...]:
        takes.append(taking_over)
        return (str(status),)

    twin = replace(scripted(spec, code), side_by_side=True, status_file=status, prepare=prepare)
    process, changes = started(twin)
    await changes.until(process.ready.is_set)
    first = process.pid
    await process.restart()
    assert takes == [False, True]
    assert process.ready.is_set()
    assert process.pid != first
    assert process.retiring == [first]
    assert not gone.exists()
    await process.retired()
    assert gone.exists()
    assert process.restarts == 0
    # What took over is watched: its death is noticed and it is started anew.
    assert process.pid is not None
    second = process.pid
    os.kill(second, signal.SIGKILL)
    await changes.until(lambda: process.ready.is_set() and process.pid != second)
    assert process.restarts == 1


async def test_a_successor_that_fails_leaves_the_run_alone(spec: ProcessSpec, started: Started) -> None:
    def prepare(taking_over: bool) -> tuple[str, ...]:
        if taking_over:
            raise OSError("no room")
        return ()

    process, changes = started(replace(spec, side_by_side=True, prepare=prepare))
    await changes.until(process.ready.is_set)
    first = process.pid
    with pytest.raises(Replaced, match="no room"):
        await process.restart()
    assert process.pid == first
    assert process.ready.is_set()


async def test_a_drained_process_stays_away_until_it_is_restarted(
    spec: ProcessSpec, started: Started
) -> None:
    process, changes = started(spec)
    await changes.until(process.ready.is_set)
    await process.drain(within_s=5.0)
    assert process.state is State.DRAINED
    assert process.pid is None
    await asyncio.sleep(0.1)
    assert process.pid is None
    await process.restart()
    await changes.until(process.ready.is_set)
    assert process.pid is not None
