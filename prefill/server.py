"""The prefill worker's process: `python -m prefill.server --config FILE`."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from kvmesh.v1 import prefill_pb2_grpc

from engine import EngineError, Executor, load
from mesh.config import ConfigError, ModelConfig
from mesh.errors import MeshError
from mesh.kv.client import KvClient
from mesh.news import Load
from mesh.processors import parse
from mesh.service import ServiceRuntime, main
from mesh.stuck import StuckWatch
from prefill.load import LoadReporter
from prefill.loop import PrefillLoop
from prefill.options import PrefillOptions, prefill_options
from prefill.pool import fingerprint_of, layout_of
from prefill.service import ALLOWED, SERVICE_NAME, PrefillService
from prefill.telemetry import LoopTelemetry


async def serve(runtime: ServiceRuntime) -> None:
    """Loads the model, attaches to the store, serves until told to stop, then drains."""
    config = runtime.config
    options = prefill_options(config.options)
    if config.model is None:
        raise ConfigError("a prefill worker needs a model")
    executor = await _load(config.model, options, config.state_dir / "cache")
    info = executor.info
    fingerprint = fingerprint_of(info)
    loop: PrefillLoop | None = None

    def lost(handoff_id: str, error: MeshError) -> None:
        if loop is not None:
            loop.lost(handoff_id)

    kv = await KvClient.attach(
        runtime.channel(config.kvstore, "kvstore"),
        worker=config.name,
        model=config.model.name,
        fingerprint=fingerprint,
        layout=layout_of(info.layout),
        on_lost=lost,
        protect=options.protect_pages,
    )
    executor.bind(kv.arena, kv.pages, kv.page_bytes)
    nats = runtime.nats
    telemetry = LoopTelemetry(runtime.registry)
    # A script takes as long as it is told to.
    watch = StuckWatch(measures=not config.model.source.startswith("script:"))
    loop = PrefillLoop(kv, executor, telemetry, options.max_runs, runtime.faults, watch)
    service = PrefillService(loop, info, runtime.verifier, config.model.name, runtime.tracer)
    rpc = runtime.serve(ALLOWED)
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, rpc.server)
    await rpc.start([SERVICE_NAME])

    def announce(*, draining: bool) -> asyncio.Task[None]:
        return runtime.announce(
            fingerprint=fingerprint.hex(),
            capacity=options.max_runs,
            draining=draining,
            extra={
                "vocab_size": str(info.vocab_size),
                "context_length": str(info.context_length),
                "hidden": str(info.hidden_size),
                "page_tokens": str(info.layout.page_tokens),
                "pages": str(kv.pages),
            },
        )

    async def send(load: Load) -> None:
        if nats is not None:
            await nats.publish_load(config.name, load)

    reporter = LoadReporter(lambda: _measure(loop, kv, telemetry), send)
    telemetry.changed = reporter.changed
    reporter.changed()
    reporting = asyncio.create_task(reporter.run())
    running = asyncio.create_task(loop.run())
    stopping = asyncio.create_task(runtime.stopping.wait())
    try:
        await announce(draining=False)
        await runtime.ready()
        ends: set[asyncio.Future[Any]] = {running, stopping, kv.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            # A bug in the loop: better a clean death than a worker that hangs.
            running.result()
        if kv.failed.done():
            # The store will never know this process again.
            raise kv.failed.result()
        service.draining = True
        await announce(draining=True)
        await loop.drain(runtime.drain_s(options.drain_s))
    finally:
        stopping.cancel()
        reporting.cancel()
        await loop.close()
        await kv.close()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting


async def _load(model: ModelConfig, options: PrefillOptions, cache: Path) -> Executor:
    def work() -> Executor:
        return load(
            model.path,
            threads=options.threads,
            cpus=parse(options.cpus),
            page_tokens=options.page_tokens,
            kv_dtype=options.kv_dtype,
            executor=options.executor,
            cache=cache,
            logits=False,
        )

    try:
        return await asyncio.to_thread(work)
    except EngineError as error:
        raise ConfigError(f"{model.name}: {error}") from error


def _measure(loop: PrefillLoop, kv: KvClient, telemetry: LoopTelemetry) -> Load:
    return Load(
        queue=telemetry.waiting,
        running=telemetry.running,
        waiting=telemetry.waiting,
        active_tokens=loop.queued_tokens,
        free_pages=kv.idle_pages,
        step_ms=round(telemetry.chunk_s * 1000, 2),
    )


if __name__ == "__main__":
    main(serve)
