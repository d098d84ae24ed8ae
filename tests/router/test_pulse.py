"""One question for all who wait for a worker; silence is told to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.pulse import Pulse

pytestmark = pytest.mark.asyncio


class Patient(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    asked = 0
    silent = False

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> health_pb2.HealthCheckResponse:
        self.asked += 1
        if self.silent:
            await asyncio.sleep(30)
        return health_pb2.HealthCheckResponse()


@pytest.fixture
async def patient() -> AsyncIterator[tuple[Patient, grpc.aio.Channel]]:
    server, health = grpc.aio.server(), Patient()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health, channel
    await server.stop(None)


async def test_a_hundred_who_wait_are_one_question(patient: tuple[Patient, grpc.aio.Channel]) -> None:
    health, channel = patient
    pulse = Pulse(fresh_s=30)
    assert all(await asyncio.gather(*(pulse.beats(channel) for _ in range(100))))
    assert await pulse.beats(channel)
    assert health.asked == 1


async def test_an_answer_is_good_for_a_while_and_no_longer(patient: tuple[Patient, grpc.aio.Channel]) -> None:
    health, channel = patient
    pulse = Pulse(fresh_s=0.05, patience_s=0.2)
    assert await pulse.beats(channel)
    await asyncio.sleep(0.1)
    health.silent = True
    assert not any(await asyncio.gather(pulse.beats(channel), pulse.beats(channel)))
    assert health.asked == 2


async def test_who_leaves_does_not_end_the_question_of_others(
    patient: tuple[Patient, grpc.aio.Channel],
) -> None:
    health, channel = patient
    pulse = Pulse(patience_s=0.5)
    health.silent = True
    leaving, staying = (asyncio.create_task(pulse.beats(channel)) for _ in range(2))
    await asyncio.sleep(0.1)
    leaving.cancel()
    assert await staying is False
    assert health.asked == 1


async def test_a_refusal_comes_from_a_living_process() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await Pulse().beats(channel)
    await server.stop(None)
