"""A whole mesh, started by the front door as a user starts it.

Knows the command line, the state directory and the edge; nothing of how the services work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from kvmesh.v1 import common_pb2, inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
LIVENESS_S = 120.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def python() -> list[str]:
    return [sys.executable, "-m", "mesh.cli.main"]


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'protos'}"
    env["KVMESH_VENV"] = sys.prefix
    return env


@dataclass
class Mesh:
    """One running mesh. `args` are what `up` was given beside --state, --port and --detach."""

    state: Path
    port: int
    args: list[str] = field(default_factory=list)
    scheme: str = "http"
    # What every command runs under, such as `ip netns exec NAME`.
    prefix: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.state / "dev-key").read_text().strip()

    def cli(self, *args: str, timeout_s: float = LIVENESS_S, check: bool = True) -> str:
        done = subprocess.run(
            [*self.prefix, *python(), *args, "--state", str(self.state)],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"kvmesh {' '.join(args)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return done.stdout

    def up(self) -> None:
        self.cli("up", "--port", str(self.port), "--detach", *self.args)

    def down(self) -> None:
        self.cli("down")

    def status(self) -> dict[str, Any]:
        out: dict[str, Any] = json.loads(self.cli("status", "--json", check=False))
        return out

    def processes(self, role: str) -> list[dict[str, Any]]:
        return [p for p in self.status()["processes"] if p["role"] == role]

    def pids(self, *roles: str) -> dict[str, int]:
        return {p["name"]: p["pid"] for p in self.status()["processes"] if not roles or p["role"] in roles}

    def new_key(self, organisation: str) -> str:
        answer = json.loads(self.cli("keys", "create", "--org", organisation, "--json"))
        secret: str = answer["secret"]
        return secret

    def leased(self) -> int:
        return sum(p["pages"]["leased"] for p in self.processes("kvstore"))

    def busy(self) -> int:
        return sum(
            int(p.get("running") or 0) + int(p.get("waiting") or 0)
            for p in self.status()["processes"]
            if p["role"] in ("prefill", "decode")
        )

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def client(self, *, key: str | None = None, timeout_s: float = LIVENESS_S) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key or self.key}"},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=400),
        )

    @contextlib.asynccontextmanager
    async def grpc(self) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    async def generate(
        self,
        model: str,
        ids: Sequence[int],
        *,
        tokens: int = 48,
        stub: inference_pb2_grpc.InferenceAsyncStub,
        sampling: common_pb2.SamplingParams | None = None,
    ) -> tuple[list[int], common_pb2.Usage]:
        """Greedy unless `sampling` says otherwise; ignores end tokens. Returns new ids and usage."""
        request = inference_pb2.GenerateRequest(
            model=model,
            prompt=common_pb2.Prompt(segments=[common_pb2.Segment(tokens=common_pb2.TokenRun(ids=ids))]),
            sampling=sampling or common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopParams(max_tokens=tokens, ignore_eos=True),
        )
        out: list[int] = []
        usage = common_pb2.Usage()
        metadata = (("authorization", f"Bearer {self.key}"),)
        async for message in stub.Generate(request, metadata=metadata, timeout=LIVENESS_S * 5):
            out.extend(message.token_ids)
            if message.HasField("usage"):
                usage = message.usage
        return out, usage

    async def settled(self, condition: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Waits until the status says so; a liveness limit, not a measurement."""
        end = time.monotonic() + within_s
        while True:
            if await asyncio.to_thread(condition):
                return
            if time.monotonic() > end:
                raise AssertionError(
                    f"not within {within_s} s: {what}\n{json.dumps(self.status(), indent=1)}"
                )
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def running(state: Path, args: Sequence[str], *, scheme: str = "http", prefix: Sequence[str] = ()) -> Any:
    mesh = Mesh(state=state, port=free_port(), args=list(args), scheme=scheme, prefix=list(prefix))
    try:
        mesh.up()
        yield mesh
    finally:
        mesh.cli("down", check=False)


def events(body: str) -> list[Any]:
    """The data of an SSE body, parsed; `[DONE]` stays a string."""
    out: list[Any] = []
    for line in body.split("\n"):
        if line.startswith("data: "):
            data = line[len("data: ") :]
            out.append(data if data == "[DONE]" else json.loads(data))
    return out
