"""What the CLI may ask of a running supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.config import drain_file
from mesh.supervisor.control import Command, ControlError, Emit
from mesh.supervisor.options import ROLES
from mesh.supervisor.plan import MOVE_S, ModelPlan
from mesh.supervisor.process import Replaced, State

if TYPE_CHECKING:
    from mesh.supervisor.mesh import Mesh
    from mesh.supervisor.process import Process

# Restarted in this order by `restart all`: what others depend on first.
_RESTART_ORDER = ("nats", "iam", "kvstore", "responses", "decode", "prefill", "encode", "router", "envoy")
DRAINABLE = ("router", "prefill", "decode", "iam")
_MODEL_READY_S = 300.0


class Commands:
    """The control channel's commands on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._changing = asyncio.Lock()

    def table(self) -> Mapping[str, Command]:
        return {
            "status": self.status,
            "down": self.down,
            "restart": self.restart,
            "drain": self.drain,
            "model_add": self.model_add,
            "model_remove": self.model_remove,
        }

    async def status(self, _: Mapping[str, Any], __: Emit) -> Mapping[str, Any]:
        return {**self._mesh.describe(), "supervisor": {"pid": os.getpid()}}

    async def down(self, _: Mapping[str, Any], __: Emit) -> Mapping[str, Any]:
        """Answers at once; the caller waits for the state directory's lock."""
        self._mesh.stop()
        return {}

    async def restart(self, request: Mapping[str, Any], emit: Emit) -> Mapping[str, Any]:
        """One process, all of a role, or all; one after the other, each ready before the next."""
        chosen = self._named(request.get("name", "all"))
        chosen.sort(key=lambda p: _RESTART_ORDER.index(p.spec.role))
        async with self._changing:
            for process in chosen:
                emit({"event": "restarting", "name": process.spec.name})
                try:
                    await process.restart()
                except Replaced as error:
                    raise ControlError(str(error)) from None
                await self._mesh.wait_ready([process.spec.name])
                told = {"name": process.spec.name, "pid": process.pid, "retiring": process.retiring}
                emit({"event": "restarted", **told})
        return {"restarted": [p.spec.name for p in chosen]}

    async def replace_all(self) -> None:
        """As `restart all`, asked by nobody; what was drained stays so."""
        for name in [p.spec.name for p in self._mesh.processes.values() if p.state is not State.DRAINED]:
            await self.restart({"name": name}, lambda _: None)

    async def drain(self, request: Mapping[str, Any], emit: Emit) -> Mapping[str, Any]:
        """Takes processes out of service, after their work; `restart` brings them back."""
        chosen = self._named(request["name"])
        within_s = float(request.get("within_s") or 0.0)
        others = {p.spec.name for p in chosen}
        async with self._changing:
            for process in chosen:
                self._may_leave(process, others, force=bool(request.get("force")))
            for process in chosen:
                emit({"event": "draining", "name": process.spec.name})
                await self._drain(process, within_s)
                emit({"event": "drained", "name": process.spec.name})
        return {"drained": [p.spec.name for p in chosen]}

    async def _drain(self, process: Process, within_s: float) -> None:
        spec, state = process.spec, self._mesh.plan.state
        usual_s = spec.retire_s if spec.side_by_side else spec.stop_s
        told = drain_file(state.run, spec.name)
        if within_s:
            told.write_text(f"{within_s:g}\n", encoding="ascii")
        try:
            # A worker needs a moment to move what has not finished by then.
            await process.drain(within_s + MOVE_S if within_s else usual_s)
        finally:
            told.unlink(missing_ok=True)

    def _named(self, wanted: str) -> list[Process]:
        chosen = [p for p in self._mesh.processes.values() if wanted in ("all", p.spec.name, p.spec.role)]
        if not chosen:
            names = ", ".join(dict.fromkeys([*self._mesh.processes, *ROLES]))
            raise ControlError(f"no process {wanted!r}; there are {names}")
        return chosen

    def _may_leave(self, process: Process, leaving: Collection[str], *, force: bool) -> None:
        """Raises ControlError where requests would fail for want of it."""
        spec = process.spec
        if spec.role not in DRAINABLE:
            raise ControlError(
                f"{spec.name}: no mesh works without a {spec.role}; 'kvmesh restart {spec.name}' replaces it"
            )
        stay = [
            other
            for other in self._mesh.processes.values()
            if (other.spec.role, other.spec.model) == (spec.role, spec.model)
            and other.spec.name not in leaving
            and other.ready.is_set()
        ]
        # Without a prefill worker decode computes prompts itself.
        if not stay and spec.role != "prefill" and not force:
            of = f" of {spec.model}" if spec.model else ""
            raise ControlError(
                f"{spec.name} is the last {spec.role}{of} that works; --force drains it all the same"
            )

    async def model_add(self, request: Mapping[str, Any], emit: Emit) -> Mapping[str, Any]:
        """Starts a model's workers; answers when they are ready."""
        from mesh.models import ModelSourceError, resolve

        name, source, mesh = request["name"], request["source"], self._mesh
        async with self._changing:
            if name in mesh.models:
                raise ControlError(f"the model {name} is already served")
            loop = asyncio.get_running_loop()

            def progress(text: str) -> None:
                loop.call_soon_threadsafe(emit, {"event": "note", "text": text})

            cache: Path = mesh.plan.state.cache
            try:
                resolved = await asyncio.to_thread(resolve, source, cache, progress=progress)
            except ModelSourceError as error:
                raise ControlError(str(error)) from None
            model = ModelPlan(name, source, resolved.path)
            workers = [mesh.add(spec) for spec in mesh.plan.workers(model)]
            mesh.models[name] = model
            await self._reload_accounts()
            for worker in workers:
                worker.start()
            try:
                async with asyncio.timeout(_MODEL_READY_S):
                    await self._ready_or_broken(workers)
            except (TimeoutError, ControlError) as error:
                log = "\n".join(line for w in workers if not w.ready.is_set() for line in w.log.tail(10))
                await self._drop(name)
                raise ControlError(
                    f"the workers of {name} did not start: {error or 'too slow'}\n{log}"
                ) from None
        return {"workers": [w.spec.name for w in workers]}

    async def model_remove(self, request: Mapping[str, Any], _: Emit) -> Mapping[str, Any]:
        """Ends a model's workers, after what they are doing."""
        name = request["name"]
        async with self._changing:
            if name not in self._mesh.models:
                raise ControlError(f"the model {name} is not served here")
            await self._drop(name)
        return {}

    async def _drop(self, name: str) -> None:
        mesh = self._mesh
        workers = [p for p in mesh.processes.values() if p.spec.model == name]
        await asyncio.gather(*(worker.stop() for worker in workers))
        for worker in workers:
            del mesh.processes[worker.spec.name]
        del mesh.models[name]

    async def _ready_or_broken(self, workers: list[Process]) -> None:
        from mesh.supervisor.mesh import START_TRIES

        pending = {asyncio.create_task(worker.ready.wait()) for worker in workers}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                broken = [w for w in workers if w.restarts >= START_TRIES and not w.ready.is_set()]
                if not done and broken:
                    raise ControlError(f"{broken[0].spec.name} {broken[0].reason}")
        finally:
            for task in pending:
                task.cancel()

    async def _reload_accounts(self) -> None:
        """Lets NATS know accounts that were made after it started."""
        await asyncio.to_thread(self._mesh.plan.write_nats_config)
        pid = self._mesh.processes["nats"].pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
