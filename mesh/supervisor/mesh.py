"""All processes of one mesh: brought up side by side, kept running, taken down in order.

`run` is the whole life: bring up, tell that it is ready, wait for the word to stop,
drain, stop, clean up. Does not know which files and options a process needs: that is
the plan's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Mapping
from typing import Any

from mesh.news import News
from mesh.supervisor.commands import Commands
from mesh.supervisor.control import ControlServer
from mesh.supervisor.envoy_admin import EnvoyAdmin
from mesh.supervisor.events import Reporter
from mesh.supervisor.plan import SUPERVISOR, ModelPlan, Plan, PlanError
from mesh.supervisor.ports import PortTaken, check_free
from mesh.supervisor.process import Process, ProcessSpec, State
from mesh.supervisor.renewal import Renewal
from mesh.supervisor.state import write_private
from mesh.supervisor.status_file import read_status
from mesh.supervisor.sweep import record, sweep
from mesh.supervisor.watch import HangWatch
from mesh.supervisor.watchdog import Guardian

# During the start a process that ends this often will not come up by itself.
START_TRIES = 3
# A configuration that a service refuses does not get better.
REFUSED_CONFIGURATION = "status 2"
_EDGE_LOOK_S = 0.1
_STOP_ORDER = (
    ("envoy",),
    ("router",),
    ("prefill", "decode", "encode"),
    ("kvstore", "iam", "responses"),
    ("nats",),
)


class StartFailed(Exception):
    """The mesh did not come up. `process` is the one at fault, if one is; `log` its last lines."""

    def __init__(self, message: str, *, process: str | None = None, log: list[str] | None = None) -> None:
        super().__init__(message)
        self.process, self.log = process, log or []


class Mesh:
    """One mesh, on a state directory that the caller holds."""

    def __init__(self, plan: Plan, models: list[ModelPlan], report: Reporter) -> None:
        self.plan, self.models, self.report = plan, {m.name: m for m in models}, report
        self.processes: dict[str, Process] = {}
        self.stopping = asyncio.Event()
        self.began = time.time()
        self.ready = False
        self._hurry = asyncio.Event()
        self._failed: asyncio.Future[StartFailed] | None = None
        self._admin = EnvoyAdmin()
        self._news: News | None = None
        self._watch = HangWatch(lambda: self.processes, report.note)
        self._guardian = Guardian(plan.state)
        commands = Commands(self)
        self._control = ControlServer(plan.state.control_socket, commands.table())
        life_s = plan.options.certificate_days * 86400.0
        self._renewal = Renewal(life_s, commands.replace_all, report.note)
        self._admin_tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Raises StartFailed; then nothing is left running either."""
        options, state = self.plan.options, self.plan.state
        for found in sweep(state.root, state.run):
            self.report.note(f"removed what an earlier run left: {found}")
        state.run.mkdir(mode=0o700, exist_ok=True)
        if options.edge:
            try:
                check_free(options.host, options.port)
            except PortTaken as error:
                raise StartFailed(str(error)) from None
        self._prepare_token()
        self._catch_signals()
        await self._guardian.start()
        try:
            await self._bring_up()
            await self.stopping.wait()
        finally:
            await self._take_down()

    def stop(self) -> None:
        """The word to stop; said twice, nothing is waited for any more."""
        if self.stopping.is_set():
            self._hurry.set()
        self.stopping.set()

    # Up

    async def _bring_up(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        await self._control.start()
        self._watch.start()
        try:
            self.add(self.plan.nats())
            # Accounts are made before NATS reads them: build every spec first.
            specs = [
                *self.plan.iams(list(self.models.values())),
                *self.plan.kvstores(),
                self.plan.responses(),
                *(spec for model in self.models.values() for spec in self.plan.workers(model)),
                *self.plan.routers(),
                *([self.plan.envoy()] if self.plan.options.edge else []),
            ]
            news = self.plan.supervisor_nats()
            self.processes["nats"].start()
            await self._ready_or_failed(["nats"])
            self._news = News(news, name=SUPERVISOR, identity=self.plan.supervisor_identity())
            await self._listen(self._news)
            for spec in specs:
                self.add(spec).start()
            await self._ready_or_failed([spec.name for spec in specs])
            await self._edge_ready()
        except PlanError as error:
            raise StartFailed(str(error)) from None
        if self.stopping.is_set():
            return
        self.ready = True
        self._failed = None
        self._renewal.start()
        self.report("ready", seconds=time.time() - self.began, url=self.plan.options.url)

    def add(self, spec: ProcessSpec) -> Process:
        """Makes the process known; the caller starts it."""
        process = Process(spec, self._changed)
        self.processes[spec.name] = process
        return process

    async def wait_ready(self, names: list[str]) -> None:
        """Returns when all of them are ready, or when the mesh is to stop."""
        stop = asyncio.create_task(self.stopping.wait())
        waiting = {asyncio.create_task(self.processes[name].ready.wait()) for name in names}
        try:
            while waiting and not stop.done():
                done, _ = await asyncio.wait({stop, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
        finally:
            for task in (stop, *waiting):
                task.cancel()

    async def _ready_or_failed(self, names: list[str]) -> None:
        assert self._failed is not None
        waiting: asyncio.Future[Any] = asyncio.create_task(self.wait_ready(names))
        await asyncio.wait({waiting, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            waiting.cancel()
            raise self._failed.result()
        await waiting

    async def _edge_ready(self) -> None:
        """The edge answers for all: it says ready when a router could serve."""
        if not self.plan.options.edge:
            return
        probe = self.plan.edge_probe("/readyz")
        end = time.monotonic() + 30.0
        while not self.stopping.is_set() and (reason := await probe()) is not None:
            if time.monotonic() > end:
                log = self.processes["router-0"].log.tail(20)
                raise StartFailed(
                    f"all processes run, but the edge is not ready: {reason}", process="router-0", log=log
                )
            await asyncio.sleep(_EDGE_LOOK_S)

    def _changed(self, process: Process) -> None:
        spec = process.spec
        self.report(
            "process",
            name=spec.name,
            role=spec.role,
            state=process.state,
            pid=process.pid,
            seconds=time.monotonic() - process.began,
            reason=process.reason,
        )
        pids = [pid for p in self.processes.values() for pid in p.pids]
        record(self.plan.state.pids, [*pids, *([self._guardian.pid] if self._guardian.pid else [])])
        if spec.role == "envoy" and process.state is State.READY:
            self._take_over_admin()
        if process.state is State.BACKOFF:
            self._maybe_give_up(process)

    def _maybe_give_up(self, process: Process) -> None:
        """Only the start gives up: later there is always another try."""
        if self._failed is None or self._failed.done() or self.stopping.is_set():
            return
        refused = REFUSED_CONFIGURATION in (process.reason or "")
        if process.restarts >= START_TRIES or refused:
            message = f"{process.spec.name} {process.reason}"
            self._failed.set_result(StartFailed(message, process=process.spec.name, log=process.log.tail(20)))

    def _take_over_admin(self) -> None:
        async def take_over() -> None:
            with contextlib.suppress(OSError):
                await self._admin.take_over(self.plan.admin_socket)

        task = asyncio.create_task(take_over())
        self._admin_tasks.add(task)
        task.add_done_callback(self._admin_tasks.discard)

    async def _listen(self, news: News) -> None:
        await news.subscribe(
            "mesh.members.>", lambda subject, _: self._watch.heard(subject.rpartition(".")[2])
        )
        await news.subscribe(
            "mesh.suspect.>", lambda subject, _: self._watch.suspect(subject.rpartition(".")[2])
        )
        await news.start()

    def _prepare_token(self) -> None:
        token = self.plan.state.metrics_token
        if not token.exists():
            write_private(token, secrets.token_urlsafe(32) + "\n")

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    # Down

    async def _take_down(self) -> None:
        self.ready = False
        self.stopping.set()
        await self._renewal.close()
        await self._watch.close()
        if self._news is not None:
            await self._news.close()
        self.report("stopping")
        drained = asyncio.create_task(self._admin.drain(self.plan.options.drain_s))
        await self._unless_hurried(drained)
        for roles in _STOP_ORDER:
            stage = [p for p in self.processes.values() if p.spec.role in roles]
            tasks = [asyncio.create_task(process.stop()) for process in stage]
            if tasks:
                await self._unless_hurried(asyncio.gather(*tasks), [p for p in stage if p.pid])
        await self._admin.close()
        self.report("stopped")
        await self._control.close()
        state = self.plan.state
        sweep(state.root, state.run)
        await self._guardian.dismiss()

    async def _unless_hurried(self, work: asyncio.Future[Any], kill: list[Process] | None = None) -> None:
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({work, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not work.done():
            if kill is None:
                work.cancel()
            for process in kill or []:
                process.kill("asked twice to stop")
        await asyncio.gather(work, return_exceptions=True)

    def describe(self) -> Mapping[str, Any]:
        """For `status`: every process as it is now."""
        options, state = self.plan.options, self.plan.state
        return {
            "ready": self.ready
            and all(p.ready.is_set() for p in self.processes.values() if p.state is not State.DRAINED),
            "uptime_s": time.time() - self.began,
            "edge_url": options.url if options.edge else None,
            "key_file": str(state.dev_key),
            "iam": self.plan.iam_address(),
            "tls": options.listen == "tcp",
            "fault_points": options.fault_points,
            "run_dir": str(state.run),
            "models": {model.name: model.source for model in self.models.values()},
            "processes": [_describe(process) for process in self.processes.values()],
        }


def _describe(process: Process) -> Mapping[str, Any]:
    spec = process.spec
    said = {} if spec.status_file is None else read_status(spec.status_file)
    return {
        "name": spec.name,
        "role": spec.role,
        "model": spec.model,
        "pid": process.pid,
        "retiring": process.retiring,
        "address": said.get("address", spec.address),
        "metrics_url": said.get("metrics_url"),
        "ready": process.ready.is_set() and said.get("ready", True) is True,
        "state": process.state,
        "uptime_s": process.uptime_s,
        "restarts": process.restarts,
        "reason": process.reason,
    }
