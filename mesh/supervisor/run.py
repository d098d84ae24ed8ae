"""From `kvmesh up` to a running mesh: the state directory is taken, models are found,
the memory for pages is measured, then everything runs until it is stopped.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from mesh.ca import CaError
from mesh.models import ModelSourceError, resolve
from mesh.supervisor.events import Listener, Reporter
from mesh.supervisor.logfile import LogFile
from mesh.supervisor.mesh import Mesh, StartFailed
from mesh.supervisor.options import MeshOptions, OptionsError, default_kv_bytes
from mesh.supervisor.plan import ModelPlan, Plan, PlanError
from mesh.supervisor.ports import PortTaken
from mesh.supervisor.state import StateDir, StateError, create_state, held


def run_mesh(options: MeshOptions, listeners: list[Listener]) -> int:
    """Runs a mesh until it is stopped; 0, or 1 after an event "failed" that says why."""
    os.umask(0o077)
    try:
        options.check()
        state = create_state(options.state)
        with held(state):
            return _run(options, state, Reporter(LogFile(state.logs / "supervisor.log"), listeners))
    except (StateError, OptionsError) as error:
        # No log yet: the directory is somebody else's, or none.
        for listener in listeners:
            listener({"event": "failed", "reason": str(error)})
        return 1


def _run(options: MeshOptions, state: StateDir, report: Reporter) -> int:
    try:
        models = [_resolve(name, source, state.cache, report) for name, source in options.models.items()]
        kv_bytes = options.kv_bytes or default_kv_bytes(available_bytes())
        mesh = Mesh(Plan(options, state, kv_bytes=kv_bytes), models, report)
        asyncio.run(mesh.run())
    except StartFailed as failure:
        report("failed", reason=str(failure), process=failure.process, log=failure.log)
        return 1
    except (PlanError, PortTaken, CaError, ModelSourceError) as error:
        report("failed", reason=str(error))
        return 1
    return 0


def available_bytes() -> int:
    """Memory that can be had now without swapping, within this container's limit."""
    import psutil

    available: int = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int(Path(file).read_text()) for file in (limit_file, used_file))
        except (OSError, ValueError):
            continue
        available = min(available, max(limit - used, 0))
    return available


def _resolve(name: str, source: str, cache: Path, report: Reporter) -> ModelPlan:
    resolved = resolve(source, cache, progress=report.note)
    return ModelPlan(name, source, resolved.path)
