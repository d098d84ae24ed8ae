"""The encode worker's process: `python -m encode.server --config FILE`."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from kvmesh.v1 import encode_pb2_grpc
from prometheus_client import Counter, Histogram

from encode.batches import Batches
from encode.bert import Bert, EncoderError
from encode.options import encode_options
from encode.service import ALLOWED, SERVICE_NAME, EncodeService
from mesh.config import ConfigError
from mesh.service import ServiceRuntime, main
from mesh.telemetry import LATENCY_BUCKETS_S


async def serve(runtime: ServiceRuntime) -> None:
    """Loads the model, serves until told to stop, then drains."""
    config = runtime.config
    options = encode_options(config.options)
    if config.model is None:
        raise ConfigError("an encode worker needs a model")
    try:
        model = await asyncio.to_thread(Bert, Path(config.model.path))
    except EncoderError as error:
        raise ConfigError(f"{config.model.name}: {error}") from error
    texts = Counter("kvmesh_encoded_texts", "Texts that were encoded.", registry=runtime.registry)
    tokens = Counter("kvmesh_encoded_tokens", "Tokens of them.", registry=runtime.registry)
    steps = Histogram(
        "kvmesh_encode_step_seconds", "One step.", buckets=LATENCY_BUCKETS_S, registry=runtime.registry
    )

    def stepped(sequences: int, step_tokens: int, seconds: float) -> None:
        texts.inc(sequences)
        tokens.inc(step_tokens)
        steps.observe(seconds)

    batches = Batches(
        model.embed,
        step_tokens=options.step_tokens,
        waiting_tokens=options.waiting_tokens,
        on_step=stepped,
    )
    service = EncodeService(batches, model, runtime.verifier, config.model.name)
    rpc = runtime.serve(ALLOWED)
    encode_pb2_grpc.add_EncodeServicer_to_server(service, rpc.server)
    await rpc.start([SERVICE_NAME])
    running = asyncio.create_task(batches.run())
    try:
        await runtime.announce(capacity=1, extra={"dimensions": str(model.dimensions)})
        await runtime.ready()
        stopping = asyncio.create_task(runtime.stopping.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if running.done():
            # A bug in the loop: better a clean death than a worker that hangs.
            running.result()
        service.draining = True
        await runtime.announce(capacity=1, draining=True)
        await rpc.stop(options.drain_s)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        batches.close()


if __name__ == "__main__":
    main(serve)
