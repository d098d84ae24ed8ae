"""The command line, run as a user runs it, without a mesh."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli.failure import Failure
from mesh.cli.keys import seconds
from mesh.cli.logs import chosen, merged
from mesh.cli.main import parser
from mesh.cli.status import pages
from mesh.cli.style import readable
from mesh.cli.trace import tree
from mesh.supervisor.state import create_state, held
from mesh.telemetry.reading import StoredSpan
from mesh.telemetry.samples import parse_samples, total

ROOT = Path(__file__).resolve().parents[2]


def kvmesh(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "kvmesh"), *map(str, arguments)],
        env={**os.environ, "KVMESH_VENV": sys.prefix, "NO_COLOR": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def commands(top: argparse.ArgumentParser) -> Iterator[list[str]]:
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield [name]
                yield from ([name, *rest] for rest in commands(below))


def test_every_command_of_the_front_door_explains_itself() -> None:
    found = list(commands(parser()))
    first = {words[0] for words in found}
    promised = "up down status restart chat keys models logs trace doctor test lint version"
    assert first >= set(promised.split())
    assert [words[1] for words in found if len(words) == 2 and words[0] == "keys"] == [
        "create",
        "list",
        "revoke",
    ]
    for words in found:
        with pytest.raises(SystemExit) as left:
            parser().parse_args([*words, "--help"])
        assert left.value.code == 0


def test_state_is_accepted_on_both_sides_of_a_subcommand() -> None:
    for words in ("models --state x list", "models list --state x", "keys --state x"):
        assert parser().parse_args(words.split()).state == Path("x")


def test_version_answers_at_once() -> None:
    began = time.monotonic()
    done = kvmesh("version")
    assert done.returncode == 0
    assert kvmesh("--version").stdout == done.stdout
    assert done.stdout.startswith("kvmesh 0.")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "command", ["status", "status --json", "restart", "keys list", "chat hi", "logs", "trace x"]
)
def test_without_a_mesh_the_exit_code_says_so(tmp_path: Path, command: str) -> None:
    done = kvmesh(*command.split(), "--state", tmp_path / "none")
    assert done.returncode == 3
    assert "is not a state directory" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["up", "--model", "nonsense"], "NAME=SOURCE"),
        (["up", "--host", "0.0.0.0"], "--tls"),
        (["up", "--kv-memory", "much"], "not a size"),
        (["up", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["explode"], "invalid choice"),
        (["grants", "permit"], "invalid choice"),
    ],
)
def test_wrong_usage_is_2_and_says_why(words: list[str], reason: str) -> None:
    done = kvmesh(*words)
    assert done.returncode == 2
    assert reason in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["up", "--model", "t=tiny:seed=1", "--port", str(port), "--state", str(tmp_path / "s")]
        for detach in ([], ["--detach"]):
            done = kvmesh(*words, *detach)
            assert done.returncode == 1
            assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_a_second_mesh_on_the_same_state_is_refused(tmp_path: Path) -> None:
    state = create_state(tmp_path / "s")
    with held(state):
        done = kvmesh("up", "--model", "t=tiny:seed=1", "--detach", "--state", state.root)
    assert done.returncode == 1
    assert "already running" in done.stderr


def test_models_are_remembered_for_the_next_start(tmp_path: Path) -> None:
    assert kvmesh("models", "add", "tiny=tiny:seed=3", "--state", tmp_path).returncode == 0
    listed = json.loads(kvmesh("models", "list", "--json", "--state", tmp_path).stdout)
    assert {m["name"]: m["source"] for m in listed} == {"smollm2": "pkg:smollm2", "tiny": "tiny:seed=3"}
    assert kvmesh("models", "remove", "smollm2", "--state", tmp_path).returncode == 0
    assert kvmesh("models", "remove", "smollm2", "--state", tmp_path).returncode == 1


def test_doctor_finds_a_foreign_directory_and_an_open_secret(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "x").write_text("")
    done = kvmesh("doctor", "--state", foreign)
    assert done.returncode == 1
    assert "not a state directory" in done.stdout
    state = create_state(tmp_path / "s")
    state.dev_key.write_text("secret")
    state.dev_key.chmod(0o644)
    done = kvmesh("doctor", "--state", state.root)
    assert done.returncode == 1
    assert "can be read by others" in done.stdout


def test_metrics_of_workers_and_stores() -> None:
    text = """# HELP kvmesh_num_requests_running x
# TYPE kvmesh_num_requests_running gauge
kvmesh_num_requests_running{model="a"} 2.0
kvmesh_num_requests_running{model="b"} 3.0
kvmesh_num_requests_waiting 1.0
kvmesh_kv_pages{model="a",state="free"} 10.0
kvmesh_kv_pages{model="a",state="leased"} 4.0
kvmesh_kv_pages{model="b",state="leased"} 5.0
"""
    samples = parse_samples(text)
    assert total(samples, "kvmesh_num_requests_running") == 5
    assert total(samples, "kvmesh_num_requests_waiting") == 1
    found = pages(samples)
    assert (found["free"], found["leased"], found["total"], found["cached"]) == (10, 9, 19, 0)


def test_a_trace_is_a_tree_in_time() -> None:
    def span(span_id: str, parent: str | None, start_ms: int, end_ms: int, name: str) -> StoredSpan:
        start_ns, end_ns = start_ms * 10**6, end_ms * 10**6
        return StoredSpan("t", span_id, parent, name, "router-0", "server", start_ns, end_ns, None, {})

    request = span("a", "outside", 0, 100, "request")
    lines = tree([request, span("c", "a", 60, 90, "decode"), span("b", "a", 0, 50, "prefill")])
    assert [line.split()[0] for line in lines] == ["request", "prefill", "decode"]
    assert lines[1].startswith("  prefill")
    assert "50.00 ms" in lines[1]


def test_logs_are_found_by_process_and_by_role(tmp_path: Path) -> None:
    for name in ("decode-a-0", "decode-a-1", "nats"):
        (tmp_path / f"{name}.log").write_text("x\n")
    assert [f.stem for f in chosen(tmp_path, "decode")] == ["decode-a-0", "decode-a-1"]
    assert [f.stem for f in chosen(tmp_path, "nats")] == ["nats"]
    with pytest.raises(Failure, match="decode-a-0"):
        chosen(tmp_path, "router")


def test_logs_of_several_processes_are_merged_by_time() -> None:
    router, nats = Path("router-0.log"), Path("nats.log")
    lines = {
        router: ['{"time": "2026-12-01T10:00:01.250Z"}', "no time", '{"time": "2026-12-01T10:00:03.000Z"}'],
        nats: ["[7] 2026/12/01 10:00:00.9 a", "[7] 2026/12/01 10:00:02.000000 b"],
    }
    shown = [line for _, line in merged(lines)]
    assert shown == [lines[nats][0], *lines[router][:2], lines[nats][1], lines[router][2]]


def test_log_lines_are_shown_to_people_as_text() -> None:
    entry = {"time": "T", "level": "critical", "message": "cannot run: no GGUF"}
    assert readable(json.dumps(entry) + "\n") == "T critical: cannot run: no GGUF"
    for other in (
        "[2026] plain text",
        "[1, 2]",
        '"a"',
        '{"time": "T"}',
        json.dumps({**entry, "exception": {}}),
    ):
        assert readable(other) == other


def test_how_long_a_key_lives() -> None:
    assert [seconds(t) for t in ("90s", "15m", "12h", "30d", "4w")] == [90, 900, 43200, 2592000, 2419200]
    for text in ("", "0d", "1y", "d", "-1d", "1.5h"):
        with pytest.raises(Failure):
            seconds(text)
