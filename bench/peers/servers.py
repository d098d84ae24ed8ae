"""The servers that are measured: started on a free port with a state of their own, and ended again."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.command import BenchError
from bench.peers.systems import LlamaCpp, Vllm

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0


def _dtypes() -> tuple[str, ...]:
    """Of the peers that use torch, the fastest first: without AVX-512 torch multiplies bfloat16 many times
    slower than float32, too slow to be waited for."""
    with contextlib.suppress(OSError):
        if "avx512f" in Path("/proc/cpuinfo").read_text():
            return ("bfloat16", "float32")
    return ("float32",)


DTYPES = _dtypes()


class Server(Protocol):
    system: str

    def started(self) -> tuple[str, str]:
        """URL and key; starts it if it does not run."""

    def close(self) -> None: ...


class Running:
    """A server that somebody else has started: `URL` or `URL,KEY`."""

    def __init__(self, system: str, place: str) -> None:
        self.system = system
        self._url, _, self._key = place.partition(",")

    def started(self) -> tuple[str, str]:
        return self._url, self._key

    def close(self) -> None:
        pass


class _Peer:
    """A foreign server: one command, ready when /health says so."""

    system = ""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — as long as the server

    def _command(self, port: int) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> Mapping[str, str]:
        return {}

    def started(self) -> tuple[str, str]:
        if self._process is None:
            port = _free_port()
            self._url = f"http://127.0.0.1:{port}"
            self._process = subprocess.Popen(
                self._command(port),
                env={**os.environ, **self._environment()},
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _share_priority(self._process.pid)
            self._await_health(self._process)
        return self._url, ""

    def close(self) -> None:
        if self._process is None:
            return
        # It may have processes of its own; the session is ours.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _await_health(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if process.poll() is not None:
                self._log.seek(0)
                last = self._log.read().decode(errors="replace").strip().splitlines()[-5:]
                raise BenchError(f"{self.system} ended with {process.returncode}: {' / '.join(last)}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=5):  # noqa: S310
                return
            time.sleep(0.5)
        raise BenchError(f"{self.system} was not ready within {START_S:.0f} s")


class LlamaServer(_Peer):
    system = "llama.cpp"

    def __init__(self, llama: LlamaCpp, model: Path, slots: int) -> None:
        super().__init__()
        self._llama, self._model, self._slots = llama, model, slots

    def _command(self, port: int) -> list[str]:
        words = ["-m", str(self._model), "-t", str(os.cpu_count() or 1), "-np", str(self._slots)]
        context = str(1024 * self._slots)
        return [self._llama.program("llama-server"), *words, "-c", context, "--port", str(port), "--no-webui"]


class VllmServer(_Peer):
    system = "vllm"

    def __init__(self, vllm: Vllm, model: Path) -> None:
        super().__init__()
        self._vllm, self._gguf = vllm, model

    def _command(self, port: int) -> list[str]:
        self._vllm.prepare(self._gguf)
        program = str(self._vllm.environment / "bin" / "vllm")
        words = ["--dtype", DTYPES[0], "--host", "127.0.0.1", "--port", str(port)]
        return [program, "serve", str(self._vllm.model), "--served-model-name", "smollm2", *words]

    def _environment(self) -> Mapping[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_NO_USAGE_STATS": "1",
        }


class Mesh:
    """Ours, through Envoy, as a user starts it."""

    system = "kvmesh"

    def __init__(self, model: Path, up: Sequence[str]) -> None:
        self._model, self._up = model, up
        self._state: tempfile.TemporaryDirectory[str] | None = None
        self._url = ""

    def started(self) -> tuple[str, str]:
        if self._state is None:
            self._state = tempfile.TemporaryDirectory(prefix="kvmesh-bench-")
            port = _free_port()
            self._url = f"http://127.0.0.1:{port}"
            words = ["--detach", "--port", str(port), "--model", f"smollm2={self._model}"]
            self._cli("up", *words, "--executor", "cpu", "--kv-dtype", "f16", *self._up)
            _share_priority(self._decode()["pid"])
        return self._url, (Path(self._state.name) / "dev-key").read_text().strip()

    def close(self) -> None:
        if self._state is not None:
            self._cli("down")
            self._state.cleanup()
            self._state = None

    def worker_footprint(self) -> dict[str, float]:
        """Kills a decode worker once; how long its successor takes to be ready, and what it holds then."""
        assert self._state is not None
        before = self._decode()
        os.kill(int(before["pid"]), signal.SIGKILL)
        while (now := self._decode())["pid"] in (before["pid"], None) or now["state"] != "ready":
            time.sleep(0.05)
        file = Path(self._state.name) / "run" / f"{now['name']}.json"
        born_s = os.stat(f"/proc/{now['pid']}").st_mtime
        status = Path(f"/proc/{now['pid']}/status").read_text()
        anonymous_kb = next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")
        )
        return {"start_s": file.stat().st_mtime - born_s, "rss_anon_mb": anonymous_kb / 1024}

    def _decode(self) -> dict[str, Any]:
        status = json.loads(self._cli("status", "--json"))
        found: dict[str, Any] = next(p for p in status["processes"] if p["role"] == "decode")
        return found

    def _cli(self, *words: str) -> str:
        assert self._state is not None
        done = subprocess.run(
            [sys.executable, "-m", "mesh.cli.main", *words, "--state", self._state.name],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
            check=False,
        )
        if done.returncode not in (0, 1) or (done.returncode and words[0] == "up"):
            raise BenchError(f"kvmesh {words[0]} failed: {done.stderr.strip()[-400:]}")
        return done.stdout


def _share_priority(process: int) -> None:
    """Gives a session of its own the standing among sessions that this one has.

    Where the kernel groups processes by session (autogroup), niceness alone says nothing across them.
    """
    with contextlib.suppress(OSError, IndexError):
        ours = Path("/proc/self/autogroup").read_text().split()[-1]
        Path(f"/proc/{process}/autogroup").write_text(ours)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
