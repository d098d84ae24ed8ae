"""The life of one service process: from its configuration file to its last breath.

Every `server.py` is `main(serve)`: this reads the configuration, starts logging,
tracing, metrics and news, gives `serve` a `ServiceRuntime`, and takes everything
down in order when `serve` returns. SIGTERM and SIGINT set `runtime.stopping`; a
second one ends the process at once. It does not know what the service does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import grpc.aio
import uvloop
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, Gauge

from mesh.config import ConfigError, ServiceConfig, drain_file, load_config
from mesh.errors import MeshError
from mesh.faults import FaultPoints, fired_file, rules_file
from mesh.files import write_atomically
from mesh.garbage import set_aside
from mesh.identity import ServiceIdentity, TokenVerifier
from mesh.news import Member, News
from mesh.rpc import RpcServer, open_channel
from mesh.telemetry.logs import configure_logging
from mesh.telemetry.metrics import MetricsServer
from mesh.telemetry.reading import TRACES, StoredSpan
from mesh.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

# For calls that the service itself has not ended: what it wants to finish, it finishes before it returns.
STOP_GRACE_S = 2.0
FORKED_EXIT_STATUS = 71


class ServiceRuntime:
    """What a service is given. `stopping` is set when it should finish and return."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.identity = ServiceIdentity.load(config.identity)
        if (self.identity.role, self.identity.name) != (config.role, config.name):
            raise ConfigError(
                f"{config.identity.cert} is of {self.identity.role}/{self.identity.name}, "
                f"not of {config.role}/{config.name}"
            )
        self.verifier = TokenVerifier(config.identity.ca)
        self.stopping = asyncio.Event()
        self.faults = FaultPoints()
        self.registry = CollectorRegistry()
        self.nats: News | None = None
        if config.nats is not None:
            self.nats = News(config.nats, name=config.name, identity=config.identity)
        self.rpc: RpcServer | None = None
        self._ready = False
        self._ready_gauge = Gauge("kvmesh_ready", "1 if this service takes work.", registry=self.registry)
        self._member: Member | None = None
        self._started_at = time.time()
        token = config.metrics.token_file.read_text(encoding="ascii").strip()
        self._metrics = MetricsServer(
            self.registry, host=config.metrics.host, port=config.metrics.port, token=token
        )
        self._tracing = Tracing(config.name, config.role, config.state_dir / TRACES)
        self._channels: list[grpc.aio.Channel] = []
        self._background: set[asyncio.Task[None]] = set()

    @property
    def tracer(self) -> Tracer:
        return self._tracing.tracer

    def forward_spans(self, spans: Iterable[StoredSpan]) -> None:
        """Spans of a process that cannot reach a collector itself go where ours go."""
        self._tracing.forward(spans)

    @property
    def address(self) -> str:
        """What others dial: `config.advertise`, with the bound port in place of port 0."""
        advertise = self.config.advertise
        if advertise.endswith(":0") and self.rpc is not None:
            return f"{advertise.rpartition(':')[0]}:{self.rpc.address.rpartition(':')[2]}"
        return advertise

    @property
    def metrics_url(self) -> str:
        return self._metrics.url

    def serve(self, allowed: Mapping[str, Collection[str]]) -> RpcServer:
        """Makes the gRPC server: add servicers to `.server`, then `await .start(service_names)`."""
        if self.rpc is not None:
            raise RuntimeError("a service has one gRPC server")
        self.rpc = RpcServer(self.config, self.identity, allowed=allowed, verifier=self.verifier)
        return self.rpc

    def channel(self, address: str, callee_role: str, *, callee_name: str | None = None) -> grpc.aio.Channel:
        """A channel to another service, closed when this one ends."""
        channel = open_channel(
            address,
            self.identity,
            callee_role=callee_role,
            tls=self.config.tls,
            callee_name=callee_name,
        )
        self._channels.append(channel)
        return channel

    def ready(self, value: bool = True) -> asyncio.Task[None]:
        """Tells health, members, metrics and the status file. Awaiting the result waits for that."""
        if value and not self._ready:
            set_aside()
        self._ready = value
        self._ready_gauge.set(value)
        return self._later(self._spread_ready())

    def announce(
        self,
        *,
        model: str | None = None,
        fingerprint: str = "",
        capacity: int = 0,
        draining: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> asyncio.Task[None]:
        """Makes this service a member, or changes what it says of itself."""
        configured = "" if self.config.model is None else self.config.model.name
        self._member = Member(
            name=self.config.name,
            role=self.config.role,
            node=self.config.node,
            address=self.address,
            model=configured if model is None else model,
            fingerprint=fingerprint,
            capacity=capacity,
            ready=self._ready,
            draining=draining,
            metrics_url=self.metrics_url,
            extra=dict(extra or {}),
        )
        return self._later(self._spread_ready())

    async def _spread_ready(self) -> None:
        if self.rpc is not None:
            await self.rpc.set_serving(self._ready)
        if self._member is not None and not self.replaced:
            self._member = replace(self._member, ready=self._ready)
            if self.nats is not None:
                await self.nats.announce(self._member)
        self._write_status()

    def _later(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @property
    def _status_file(self) -> Path:
        return self.config.run_dir / f"{self.config.name}.json"

    @property
    def replaced(self) -> bool:
        """Whether another process of this name has taken over and this one only finishes."""
        try:
            said = json.loads(self._status_file.read_bytes())
        except (OSError, ValueError):
            return False
        return said.get("pid") != os.getpid() and float(said.get("started_at", 0.0)) > self._started_at

    def drain_s(self, configured_s: float) -> float:
        """How long running work may take after SIGTERM: as configured, or as `kvmesh drain` was told."""
        try:
            return float(drain_file(self.config.run_dir, self.config.name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return configured_s

    def _write_status(self) -> None:
        if self.replaced:
            return
        status = {
            "name": self.config.name,
            "role": self.config.role,
            "node": self.config.node,
            "pid": os.getpid(),
            "address": self.address,
            "metrics_url": self.metrics_url,
            "ready": self._ready,
            "started_at": self._started_at,
        }
        write_atomically(self._status_file, json.dumps(status).encode() + b"\n")

    async def open(self) -> None:
        """Starts metrics, tracing and news."""
        self._tracing.install()
        await self._metrics.start()
        if self.nats is not None:
            await self.nats.start()
        self._write_status()

    async def close(self) -> None:
        """Not ready, goodbye to the members, running calls get their grace, then everything ends."""
        self._ready = False
        self._ready_gauge.set(0)
        if self.nats is not None:
            await self.nats.close()
        if self.rpc is not None:
            await self.rpc.stop(STOP_GRACE_S)
        for channel in self._channels:
            await channel.close(None)
        for task in tuple(self._background):
            task.cancel()
        await self._metrics.close()
        await asyncio.to_thread(self._tracing.close)
        if not self.replaced:
            self._status_file.unlink(missing_ok=True)


Serve = Callable[[ServiceRuntime], Awaitable[None]]


async def run_service(config: ServiceConfig, serve: Serve) -> None:
    """Runs `serve` until it returns; cancels it if it does not return in time after a stop."""
    runtime = ServiceRuntime(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, runtime, number)
    if config.fault_points:
        log.warning("this process has fault points")
        loop.add_signal_handler(signal.SIGUSR2, _load_faults, runtime)
        _load_faults(runtime)
    await runtime.open()
    log.info("started")
    try:
        await serve(runtime)
    finally:
        await runtime.close()
        log.info("stopped")


def _load_faults(runtime: ServiceRuntime) -> None:
    run_dir, name = runtime.config.run_dir, runtime.config.name
    runtime.faults.load(rules_file(run_dir, name), fired_file(run_dir, name))


def _stop(runtime: ServiceRuntime, number: int) -> None:
    if runtime.stopping.is_set():
        os._exit(128 + number)
    if runtime.nats is not None and runtime.replaced:
        runtime.nats.hush()
    runtime.stopping.set()


def main(serve: Serve, argv: Iterable[str] | None = None) -> None:
    """The whole of a `server.py`. Exits with 0 after a stop, 1 after a failure, 2 for a bad configuration."""
    try:
        config = load_config(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"configuration: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # gRPC writes to standard error of its own accord; an ordinary GOAWAY is no news.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    forbid_fork()
    listener = configure_logging(config.name)
    status = 0
    try:
        uvloop.run(run_service(config, serve))
    except (ConfigError, MeshError, OSError, ValueError) as error:
        log.critical("%s cannot run: %s: %s", config.name, type(error).__name__, error)
        status = 1
    except Exception:
        log.critical("%s failed", config.name, exc_info=True)
        status = 1
    finally:
        listener.stop()
    raise SystemExit(status)


def forbid_fork() -> None:
    """From now on a forked child of this process ends at once.

    A child would inherit gRPC's live connections and threads that do not exist in
    it, and hang. Starting a program (fork and exec without a `preexec_fn`) is
    unaffected: Python does not run these hooks for it.
    """

    def end_child() -> None:
        os.write(2, b"kvmesh: a service must not fork; use the spawn start method\n")
        os._exit(FORKED_EXIT_STATUS)

    os.register_at_fork(after_in_child=end_child)
