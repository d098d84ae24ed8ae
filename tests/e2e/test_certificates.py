"""Certificates: NATS wants them, and they are renewed under load before they expire."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509

from tests.e2e.harness import Mesh, running

LIFE_S = 120.0


def expiries(mesh: Mesh) -> dict[str, datetime.datetime]:
    """When the certificate of each running service expires."""
    found = {}
    for process in mesh.status()["processes"]:
        if process["role"] != "envoy":
            pem = (mesh.state / "identities" / f"{process['name']}.pem").read_bytes()
            found[process["name"]] = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    return found


async def greeted(mesh: Mesh, context: ssl.SSLContext) -> bytes:
    """What NATS says to a client that has finished its handshake."""
    [nats] = mesh.processes("nats")
    host, port = nats["address"].removeprefix("tls://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        assert (await reader.readline()).startswith(b"INFO ")
        await writer.start_tls(context, server_hostname="localhost")
        writer.write(b'CONNECT {"verbose":true}\r\n')
        await writer.drain()
        return await asyncio.wait_for(reader.readline(), 10)
    finally:
        writer.close()


async def test_nats_talks_to_nobody_without_a_certificate(tmp_path: Path) -> None:
    args = ["--model", "script=script:", "--listen", "tcp", "--no-edge"]
    with running(tmp_path / "state", args) as mesh:
        ids = mesh.state / "identities"
        with_one = ssl.create_default_context(cafile=str(mesh.state / "ca" / "ca.pem"))
        without = ssl.create_default_context(cafile=str(mesh.state / "ca" / "ca.pem"))
        with_one.load_cert_chain(ids / "router-0.pem", ids / "router-0.key")
        # A certificate is not enough either: it has no password.
        assert b"Authorization Violation" in await greeted(mesh, with_one)
        try:
            answer = await greeted(mesh, without)
        except (ssl.SSLError, ConnectionError):
            answer = b""
        assert answer == b"", "the connection is closed without a word"


@pytest.mark.slow
async def test_certificates_are_renewed_under_load_before_they_expire(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(f"certificate_days = {LIFE_S / 86400}\n")
    pairs = ["--router", "2", "--prefill", "2", "--decode", "2", "--kv-memory", "64M"]
    args = ["--config", str(file), "--model", "tiny=tiny:seed=1", "--listen", "tcp", *pairs]
    with running(tmp_path / "state", args) as mesh:
        began, before, pids = time.monotonic(), expiries(mesh), mesh.pids()
        answered = 0

        async def asks(number: int) -> None:
            nonlocal answered
            turn = 0
            # Beyond the life of what they began with.
            while time.monotonic() - began < LIFE_S + 15:
                turn += 1
                body = {"model": "tiny", "prompt": f"{number} {turn} " * 9, "max_tokens": 12}
                async with mesh.client() as client:
                    answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                answered += 1
                await asyncio.sleep(0.1)

        await asyncio.gather(*(asks(number) for number in range(4)))
        after = expiries(mesh)
        assert answered > 100
        assert all(after[name] > before[name] for name in before)
        assert not set(pids.values()) & set(mesh.pids().values())
        print(f"{answered} requests, 0 failed, {len(after)} certificates renewed")
