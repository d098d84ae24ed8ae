"""What is run in turns: for each part, one job per system. A job gives figures with units in their keys."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import BenchError
from bench.peers.servers import DTYPES, LlamaServer, Mesh, Running, Server, VllmServer
from bench.peers.systems import LLAMA_HOW, VLLM_HOW, LlamaCpp, Vllm

ROOT = Path(__file__).resolve().parents[2]
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    model: Path
    name: str
    llama: LlamaCpp | None
    vllm: Vllm | None
    concurrency: int
    requests: int
    up: tuple[str, ...]
    running: Mapping[str, str]

    def missing(self) -> list[str]:
        return [how for how, found in ((LLAMA_HOW, self.llama), (VLLM_HOW, self.vllm)) if found is None]


@dataclass(frozen=True, slots=True)
class Job:
    system: str
    run: Callable[[], Figures]
    close: Callable[[], None] = lambda: None


def engine(threads: int) -> Callable[[Setting], list[Job]]:
    def jobs(setting: Setting) -> list[Job]:
        prefix = f"{setting.name}.engine-{threads}t."

        def ours() -> Figures:
            row = _ours(setting, threads, "--batches", "1", "--depths")
            keys = ("pp512_tok_s", "tg64_tok_s", "pp512_int8_peak_pct", "tg64_read_peak_pct", "load_s")
            return {prefix + key: float(row[key]) for key in keys if key in row}

        def theirs() -> Figures:
            rows = _llama_bench(setting, threads, "-p", "512", "-n", "64")
            return {
                prefix + ("pp512_tok_s" if row["n_prompt"] else "tg64_tok_s"): float(row["avg_ts"])
                for row in rows
            }

        return [Job("kvmesh", ours), *_llama(setting, theirs)]

    return jobs


def depth(tokens: int) -> Callable[[Setting], list[Job]]:
    def jobs(setting: Setting) -> list[Job]:
        key = f"{setting.name}.depth-{tokens}.tg32_tok_s"

        def ours() -> Figures:
            row = _ours(setting, 1, "--batches", "--depths", str(tokens))
            figures = {key: float(row[f"tg32_d{tokens}_tok_s"])}
            return figures | {key.replace("tok_s", "gb_s"): float(row[f"tg32_d{tokens}_gb_s"])}

        def theirs() -> Figures:
            rows = _llama_bench(setting, 1, "-p", "0", "-n", "32", "-d", str(tokens))
            return {key: float(rows[0]["avg_ts"])}

        return [Job("kvmesh", ours), *_llama(setting, theirs)]

    return jobs


def batch(setting: Setting) -> list[Job]:
    key = f"{setting.name}.batch-16.tg_tok_s"

    def ours() -> Figures:
        row = _ours(setting, 1, "--batches", "16", "--depths")
        return {key: float(row["tg64_b16_tok_s"])}

    def theirs() -> Figures:
        assert setting.llama is not None
        lines = _output(
            [
                setting.llama.program("llama-batched-bench"),
                *("-m", str(setting.model), "-t", "1", "-c", "2048"),
                *("-npp", "64", "-ntg", "64", "-npl", "16", "--output-format", "jsonl"),
            ]
        ).splitlines()
        row = json.loads(next(line for line in lines if line.startswith("{")))
        return {key: float(row["speed_tg"])}

    return [Job("kvmesh", ours), *_llama(setting, theirs)]


def steps(setting: Setting) -> list[Job]:
    prefix = f"{setting.name}.steps."

    def ours() -> Figures:
        row = _ours(setting, 1, "--batches", "1", "16", "--depths")
        keys = {"pp512_tok_s": "pp512_tok_s", "tg64_tok_s": "tg64_tok_s", "tg64_b16_tok_s": "tg64_b16_tok_s"}
        figures = {prefix + key: float(row[name]) for key, name in keys.items()}
        return figures | {prefix + "spread_ms": float(row["tg64_step_spread_ms"])}

    def theirs() -> Figures:
        assert setting.vllm is not None
        setting.vllm.prepare(setting.model)
        script = Path(__file__).with_name("torch_steps.py")
        command = [setting.vllm.python, str(script), str(setting.vllm.model), "1", *DTYPES]
        row = json.loads(_output(command).splitlines()[-1])
        return {prefix + key: float(value) for key, value in row.items()}

    return [Job("kvmesh", ours), *([] if setting.vllm is None else [Job("transformers", theirs)])]


def server(setting: Setting) -> list[Job]:
    """Started when first measured, and all stay until the end: an idle server costs its neighbours little."""
    servers: list[Server] = [Running(system, place) for system, place in setting.running.items()]
    if "kvmesh" not in setting.running:
        servers.append(Mesh(setting.model, setting.up))
    if setting.llama is not None and "llama.cpp" not in setting.running:
        servers.append(LlamaServer(setting.llama, setting.model, setting.concurrency))
    if setting.vllm is not None and "vllm" not in setting.running:
        servers.append(VllmServer(setting.vllm, setting.model))

    def job(one: Server) -> Job:
        def run() -> Figures:
            url, key = one.started()
            words = ["serve", "--json", "--url", url, "--model", "smollm2", "--key", key]
            # Never the prompts of a round before: servers remember them.
            words += ["--seed", str(time.time_ns())]
            words += ["-c", str(setting.concurrency), "-n", str(setting.requests)]
            row = _bench(words)
            if row["requests_failed"]:
                raise BenchError(f"{one.system}: {row['first_error']}")
            keys = (
                "out_tok_s",
                "prompt_tok_s",
                "ttft_p50_ms",
                "ttft_p99_ms",
                "itl_p50_ms",
                "itl_p99_ms",
                "itl_max_ms",
            )
            return {f"{setting.name}.server.{key}": float(row[key]) for key in keys}

        return Job(one.system, run, one.close)

    return [job(one) for one in servers]


def worker(setting: Setting) -> list[Job]:
    mesh = Mesh(setting.model, setting.up)

    def run() -> Figures:
        mesh.started()
        return {f"{setting.name}.worker.{key}": value for key, value in mesh.worker_footprint().items()}

    return [Job("kvmesh", run, mesh.close)]


PARTS: Mapping[str, Callable[[Setting], list[Job]]] = {
    "engine-1t": engine(1),
    "engine-2t": engine(2),
    "depth-1024": depth(1024),
    "depth-4096": depth(4096),
    "batch-16": batch,
    "steps": steps,
    "server": server,
    "worker": worker,
}


def _llama(setting: Setting, run: Callable[[], Figures]) -> list[Job]:
    return [] if setting.llama is None else [Job("llama.cpp", run)]


def _ours(setting: Setting, threads: int, *words: str) -> dict[str, Any]:
    common = ["engine", "--json", "--model", str(setting.model), "--threads", str(threads), "--repeats", "1"]
    return _bench([*common, *words])


def _bench(words: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(_output([sys.executable, "-m", "bench", *words]))
    return row


def _llama_bench(setting: Setting, threads: int, *words: str) -> list[dict[str, Any]]:
    assert setting.llama is not None
    program = setting.llama.program("llama-bench")
    output = _output([program, "-m", str(setting.model), "-t", str(threads), "-r", "1", "-o", "json", *words])
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def _output(command: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise BenchError(f"{Path(command[0]).name} ended with {done.returncode}: {' / '.join(last)}")
    return done.stdout
