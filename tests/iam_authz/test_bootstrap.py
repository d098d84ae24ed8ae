"""The first start, later starts, and the service as a process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from mesh.ca import CertificateAuthority
from mesh.config import MetricsConfig, ServiceConfig, write_config
from mesh.identity import ServiceIdentity
from mesh.rpc import open_channel
from tests.iam_authz.world import running_iam

ROOT = Path(__file__).resolve().parents[2]


def options(state: Path, *models: str) -> dict[str, Any]:
    entries = [{"name": name, "source": "tiny:seed=1"} for name in models]
    return {
        "bootstrap": {
            "organisation": "dev",
            "dev_key_file": str(state / "dev-key"),
            "models": entries,
        }
    }


async def test_the_first_start_makes_a_key_that_works(tmp_path: Path) -> None:
    async with running_iam(tmp_path, options=options(tmp_path, "small", "org/big")) as world:
        file = tmp_path / "dev-key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        assert world.identity_of(await world.check(f"Bearer {key}")).claims["org"] == "dev"
        snapshot = world.iam.directory.snapshot
        assert [model.name for model in snapshot.models] == ["org/big", "small"]
        assert [(grant.organisation, grant.model) for grant in snapshot.grants] == [("dev", "*")]


async def test_later_starts_change_only_what_is_missing(tmp_path: Path) -> None:
    async with running_iam(tmp_path, options=options(tmp_path, "small")) as world:
        key = (tmp_path / "dev-key").read_text()
        await world.admin.RemoveGrant(iam_pb2.RemoveGrantRequest(organisation="dev", model="*"))
        await world.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id="dev", suspended=True))
        version = world.iam.directory.snapshot.version
    async with running_iam(tmp_path, options=options(tmp_path, "small")) as world:
        assert (tmp_path / "dev-key").read_text() == key
        snapshot = world.iam.directory.snapshot
        assert snapshot.version == version
        assert snapshot.grants == ()
        assert snapshot.organisations[0].suspended
    async with running_iam(tmp_path, options=options(tmp_path, "second")) as world:
        assert [model.name for model in world.iam.directory.snapshot.models] == ["second", "small"]


async def test_a_development_key_that_does_not_work_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "dev-key"
    file.write_text("kvm_rubbish")
    async with running_iam(tmp_path, options=options(tmp_path)) as world:
        first = file.read_text().strip()
        assert (await world.check(f"Bearer {first}")).status.code == 0
        await world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=first.split("_")[1]))
    async with running_iam(tmp_path, options=options(tmp_path)) as world:
        second = file.read_text().strip()
        assert second != first
        assert (await world.check(f"Bearer {second}")).status.code == 0
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.unlink()
    async with running_iam(tmp_path, options=options(tmp_path)) as world:
        assert (await world.check(f"Bearer {file.read_text().strip()}")).status.code == 0


async def test_two_that_start_at_once_agree(tmp_path: Path) -> None:
    started = asyncio.Barrier(2)

    async def start(name: str) -> tuple[str, int]:
        async with running_iam(tmp_path, options=options(tmp_path, "m"), name=name) as world:
            await started.wait()
            keys = (await world.admin.ListKeys(iam_pb2.ListKeysRequest())).keys
            await started.wait()
            return (tmp_path / "dev-key").read_text(), len(keys)

    CertificateAuthority.open_or_create(tmp_path / "ca")
    one, two = await asyncio.gather(start("iam-0"), start("iam-1"))
    assert one == two
    assert one[1] == 1


def service_config(
    state: Path, run: Path, extra: dict[str, Any]
) -> tuple[ServiceConfig, CertificateAuthority]:
    ca = CertificateAuthority.open_or_create(state / "ca")
    token = state / "metrics-token"
    token.write_text(secrets.token_urlsafe())
    config = ServiceConfig(
        name="iam-0",
        role="iam",
        node="local",
        state_dir=state,
        run_dir=run,
        listen=f"unix:{run}/iam.sock",
        advertise=f"unix:{run}/iam.sock",
        tls=False,
        identity=ca.issue(state / "id", role="iam", name="iam-0"),
        metrics=MetricsConfig("127.0.0.1", 0, token),
        options=extra,
    )
    return config, ca


async def start_process(file: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "iam_authz.server",
        "--config",
        str(file),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_the_service_starts_answers_and_stops(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="iam") as run:
        config, ca = service_config(tmp_path, Path(run), options(tmp_path, "m"))
        file = tmp_path / "iam.json"
        write_config(file, config)
        process = await start_process(file)
        operator = ServiceIdentity.load(ca.issue(tmp_path / "id", role="operator", name="op"))
        channel = open_channel(config.listen, operator, callee_role="iam", tls=False)
        try:
            async with asyncio.timeout(15):
                stub = iam_pb2_grpc.AdminStub(channel)
                answer = await stub.ListKeys(iam_pb2.ListKeysRequest(), wait_for_ready=True)
            assert [key.name for key in answer.keys] == ["development"]
            await channel.close(None)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(15):
                output, _ = await process.communicate()
            assert process.returncode == 0, output.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    lines = [json.loads(line) for line in output.decode().splitlines()]
    assert {"started", "stopped"} <= {line["message"] for line in lines}
    secret = (tmp_path / "dev-key").read_text().strip()
    assert secret[20:40] not in output.decode()


async def test_a_configuration_that_cannot_be_is_told(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="iam") as run:
        config, _ = service_config(tmp_path, Path(run), {"issuers": [{"issuer": "x"}]})
        file = tmp_path / "iam.json"
        write_config(file, config)
        process = await start_process(file)
        async with asyncio.timeout(15):
            output, _ = await process.communicate()
    assert process.returncode == 1
    assert "options.issuers[0]" in output.decode()
