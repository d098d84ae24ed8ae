"""The decode worker's process: `python -m decode.server --config FILE`."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from kvmesh.v1 import decode_pb2_grpc

from decode.admission import Admission
from decode.grammars import WorkerGrammars
from decode.load import LoadReporter
from decode.loop import DecodeLoop
from decode.opening import Limits
from decode.options import DecodeOptions, decode_options
from decode.pacing import Pacing
from decode.pool import fingerprint_of, layout_of
from decode.service import ALLOWED, SERVICE_NAME, CapabilityCheck, DecodeService
from decode.spans import RequestSpans
from decode.stepper import Stepper
from decode.telemetry import LoopTelemetry
from engine import EngineError, Executor, load
from mesh.config import ConfigError, ModelConfig
from mesh.errors import MeshError
from mesh.kv.client import KvClient
from mesh.news import Load
from mesh.processors import parse
from mesh.service import ServiceRuntime, main
from mesh.stuck import StuckWatch
from text import load_text_model
from text.grammar import Grammars


async def serve(runtime: ServiceRuntime) -> None:
    """Loads the model, attaches to the store, serves until told to stop, then drains."""
    config = runtime.config
    options = decode_options(config.options)
    if config.model is None:
        raise ConfigError("a decode worker needs a model")
    executor = await _load(config.model, options, config.state_dir / "cache")
    info = executor.info
    fingerprint = fingerprint_of(info)
    admission: Admission | None = None

    def lost(handoff_id: str, error: MeshError) -> None:
        if admission is not None:
            admission.lost(handoff_id)

    def away() -> None:
        if admission is not None:
            admission.store_away()

    kv = await KvClient.attach(
        runtime.channel(config.kvstore, "kvstore"),
        worker=config.name,
        model=config.model.name,
        fingerprint=fingerprint,
        layout=layout_of(info.layout),
        on_lost=lost,
        on_away=away,
        standby=True,
        protect=options.protect_pages,
    )
    executor.bind(kv.arena, kv.pages, kv.page_bytes)
    limits = Limits(
        page_tokens=info.layout.page_tokens,
        pages=kv.pages,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        max_seqs=options.max_seqs,
        step_tokens=options.step_tokens,
    )
    nats = runtime.nats
    telemetry = LoopTelemetry(runtime.registry)
    loop = DecodeLoop(
        kv,
        Stepper(executor, kv.arena, kv.page_bytes),
        limits,
        telemetry,
        RequestSpans(runtime.tracer),
        runtime.faults,
        Pacing(options.pace_s),
        # A script takes as long as it is told to.
        StuckWatch(measures=not config.model.source.startswith("script:")),
    )
    grammars = WorkerGrammars(partial(_grammars, config.model.path, info.vocab_size))
    admission = Admission(kv, loop, CapabilityCheck(runtime.verifier, config.model.name), grammars)
    service = DecodeService(admission, loop.wake)
    rpc = runtime.serve(ALLOWED)
    decode_pb2_grpc.add_DecodeServicer_to_server(service, rpc.server)
    await rpc.start([SERVICE_NAME])

    def announce(*, draining: bool) -> asyncio.Task[None]:
        return runtime.announce(
            fingerprint=fingerprint.hex(),
            capacity=options.max_seqs,
            draining=draining,
            extra={
                "vocab_size": str(info.vocab_size),
                "context_length": str(info.context_length),
                "hidden": str(info.hidden_size),
                "page_tokens": str(limits.page_tokens),
                "pages": str(limits.pages),
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
        admission.draining = True
        await announce(draining=True)
        await loop.drain(runtime.drain_s(options.drain_s))
    finally:
        service.close()
        stopping.cancel()
        reporting.cancel()
        if not running.done():
            await loop.close()
        grammars.close()
        await kv.close()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting


async def _load(model: ModelConfig, options: DecodeOptions, cache: Path) -> Executor:
    def work() -> Executor:
        return load(
            model.path,
            threads=options.threads,
            cpus=parse(options.cpus),
            page_tokens=options.page_tokens,
            kv_dtype=options.kv_dtype,
            executor=options.executor,
            cache=cache,
        )

    try:
        return await asyncio.to_thread(work)
    except EngineError as error:
        raise ConfigError(f"{model.name}: {error}") from error


def _grammars(path: str, vocab_size: int) -> Grammars:
    text = load_text_model(path)
    return Grammars(text.tokenizer, text.end_ids, vocab_size)


def _measure(loop: DecodeLoop, kv: KvClient, telemetry: LoopTelemetry) -> Load:
    requests = list(loop.scheduler)
    return Load(
        running=telemetry.running,
        waiting=telemetry.waiting,
        active_tokens=sum(len(choice.tokens) for request in requests for choice in request.choices),
        free_pages=kv.idle_pages,
        step_ms=round(telemetry.step_s * 1000, 2),
    )


if __name__ == "__main__":
    main(serve)
