"""Every door of every process: found by looking at the processes, so that a new one cannot be forgotten."""

from __future__ import annotations

import os
import stat

import httpx
import psutil

from tests.e2e.harness import Mesh


def listening(pid: int) -> list[tuple[str, int]]:
    """TCP addresses that a process listens on."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return [(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def test_every_tcp_port_is_known_and_denies(mesh: Mesh) -> None:  # B98
    status = mesh.status()
    ports = 0
    for process in status["processes"]:
        metrics = process["metrics_url"]
        expected = {int(metrics.split(":")[2].split("/")[0])} if metrics else set()
        if process["role"] == "nats":
            expected.add(int(process["address"].rsplit(":", 1)[1]))
        if process["role"] == "envoy":
            expected.add(mesh.port)
        found = listening(process["pid"])
        assert {port for _, port in found} == expected, process["name"]
        assert all(host in ("127.0.0.1", "::1") for host, _ in found), process["name"]
        ports += len(found)
        for host, port in found:
            if process["role"] != "nats":
                for path in ("/", "/metrics", "/debug", "/config_dump", "/quitquitquit", "/v1/models"):
                    for method in ("GET", "POST"):
                        answer = httpx.request(method, f"http://{host}:{port}{path}", timeout=10)
                        assert answer.status_code == 401, (process["name"], method, path)
    assert ports >= len(status["processes"])
    assert not listening(status["supervisor"]["pid"])


def test_every_unix_socket_is_the_owners_alone(mesh: Mesh) -> None:
    run = mesh.state / "run"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    sockets = [path for path in run.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    names = {path.name for path in sockets}
    assert {"supervisor.sock", "iam-0.sock", "router-0.openai.sock"} <= names
    # Envoy's admin asks for no credential: once the supervisor has connected, nobody else can.
    assert "envoy-admin.sock" not in names
    for path in sockets:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert path.stat().st_uid == os.geteuid()
