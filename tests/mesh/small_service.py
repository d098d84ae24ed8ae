"""The smallest service there can be, run as a process by the tests.

It has one method, which does what its argument says.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
from typing import Any

from kvmesh.v1 import inference_pb2, inference_pb2_grpc

from mesh.config import ConfigError
from mesh.service import ServiceRuntime, main


class Commands(inference_pb2_grpc.InferenceServicer):
    Generate = inference_pb2_grpc.InferenceServicer.Generate
    ListModels = inference_pb2_grpc.InferenceServicer.ListModels

    async def Tokenize(self, request: Any, context: Any) -> Any:
        logging.getLogger("small").info("asked", extra={"asked": request.text})
        match request.text:
            case "fork":
                result = await asyncio.to_thread(fork)
            case "multiprocessing":
                result = await asyncio.to_thread(multiply)
            case "program":
                result = await asyncio.to_thread(program)
            case _:
                result = os.getpid()
        return inference_pb2.TokenizeResponse(token_ids=[result])


def fork() -> int:
    """The exit status of a forked child that would go on as this service."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    return as_a_shell_says(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def multiply() -> int:
    child = multiprocessing.get_context("fork").Process(target=print)
    child.start()
    child.join()
    return as_a_shell_says(child.exitcode or 0)


def as_a_shell_says(status: int) -> int:
    """128 + the signal for a child that a signal ended: rpc fields hold no negative numbers."""
    return status if status >= 0 else 128 - status


def program() -> int:
    return subprocess.run([sys.executable, "-c", "raise SystemExit(5)"], check=False).returncode


async def serve(runtime: ServiceRuntime) -> None:
    if "fail" in runtime.config.options:
        raise ConfigError("told to fail")
    rpc = runtime.serve({"/kvmesh.v1.Inference/": {"router"}})
    inference_pb2_grpc.add_InferenceServicer_to_server(Commands(), rpc.server)  # type: ignore[abstract]
    await rpc.start(["kvmesh.v1.Inference"])
    runtime.announce(capacity=3)
    await runtime.ready()
    await runtime.stopping.wait()
    if "linger" in runtime.config.options:
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(serve)
