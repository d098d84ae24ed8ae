"""Fetching an issuer's keys: how often, how long, and what happens when it is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from iam_authz.jwks import COOLDOWN_S, MAX_JWKS_BYTES, UNKNOWN_KEPT_S, Jwks
from iam_authz.options import Issuer
from mesh.errors import Unavailable


def jwk(kid: str | None) -> dict[str, Any]:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    members: dict[str, Any] = json.loads(ECAlgorithm.to_jwk(key))
    return members if kid is None else {**members, "kid": kid}


class Provider:
    """An issuer's key endpoint, and the time."""

    def __init__(self, *kids: str | None) -> None:
        self.now = 1_000.0
        self.fetches = 0
        self.away = False
        self.gate: asyncio.Event | None = None
        self.document: bytes = b""
        self.publish(*kids)

    def publish(self, *kids: str | None) -> None:
        self.document = json.dumps({"keys": [jwk(kid) for kid in kids]}).encode()

    async def fetch(self) -> bytes:
        self.fetches += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise OSError("connection refused")
        return self.document

    def cache(self, **options: Any) -> Jwks:
        issuer = Issuer("https://idp.test", ("api",), jwks_url="https://idp.test/jwks", **options)
        return Jwks(issuer, self.fetch, clock=lambda: self.now)


async def background(jwks: Jwks) -> None:
    running = jwks._running
    if running is not None:
        await running


async def test_one_fetch_serves_all_who_wait() -> None:
    provider = Provider("a")
    provider.gate = asyncio.Event()
    jwks = provider.cache()
    waiting = [asyncio.create_task(jwks.find("a", "ES256")) for _ in range(50)]
    await asyncio.sleep(0)
    provider.gate.set()
    assert all(key is not None for key in await asyncio.gather(*waiting))
    assert provider.fetches == 1


async def test_old_keys_answer_while_new_ones_are_fetched() -> None:
    provider = Provider("a")
    jwks = provider.cache(soft_ttl_s=300)
    await jwks.find("a", "ES256")
    provider.now += 299
    await jwks.find("a", "ES256")
    assert provider.fetches == 1
    provider.gate = asyncio.Event()
    provider.now += 2
    provider.publish("b")
    assert await asyncio.wait_for(jwks.find("a", "ES256"), 1) is not None
    provider.gate.set()
    await background(jwks)
    assert await jwks.find("a", "ES256") is None, "a key that was withdrawn is gone"
    assert await jwks.find("b", "ES256") is not None


async def test_a_rotation_is_seen_at_once_but_guessing_costs_nothing() -> None:
    provider = Provider("a")
    jwks = provider.cache()
    await jwks.find("a", "ES256")
    provider.publish("a", "b")
    provider.now += COOLDOWN_S
    assert await jwks.find("b", "ES256") is not None
    assert provider.fetches == 2
    for number in range(100):
        assert await jwks.find(f"guess-{number}", "ES256") is None
    assert provider.fetches == 2
    provider.now += COOLDOWN_S
    for number in range(100):
        assert await jwks.find(f"guess-{number}", "ES256") is None
    assert provider.fetches == 3


async def test_an_unknown_id_is_remembered_for_a_while() -> None:
    provider = Provider("a")
    jwks = provider.cache()
    await jwks.find("a", "ES256")
    provider.now += COOLDOWN_S
    await jwks.find("x", "ES256")
    provider.now += COOLDOWN_S
    await jwks.find("x", "ES256")
    assert provider.fetches == 2
    provider.now += UNKNOWN_KEPT_S
    await jwks.find("x", "ES256")
    assert provider.fetches == 3


async def test_an_outage_keeps_the_last_good_keys_until_the_hard_limit() -> None:
    provider = Provider("a")
    jwks = provider.cache(soft_ttl_s=300, hard_ttl_s=3_600)
    await jwks.find("a", "ES256")
    provider.away = True
    for _ in range(10):
        provider.now += 329
        assert await jwks.find("a", "ES256") is not None
        await background(jwks)
    provider.now += 400
    with pytest.raises(Unavailable):
        await jwks.find("a", "ES256")
    provider.away = False
    provider.now += 60
    assert await jwks.find("a", "ES256") is not None


async def test_a_broken_document_changes_nothing() -> None:
    provider = Provider("a")
    jwks = provider.cache(soft_ttl_s=10)
    await jwks.find("a", "ES256")
    broken = (
        b"",
        b"<html>",
        b"[]",
        b'{"keys": {}}',
        b'{"keys": []}',
        b'{"keys": [1, null, {"kty": "oct", "k": "eA"}]}',
        b'{"keys": ' + b"[" * 5_000 + b"}",
        b'{"keys": [], "keys": []}',
        b" " * (MAX_JWKS_BYTES + 1),
        json.dumps({"keys": [jwk(str(number)) for number in range(101)]}).encode(),
    )
    for document in broken:
        provider.document = document
        provider.now += 60
        await jwks.find("a", "ES256")
        await background(jwks)
        assert await jwks.find("a", "ES256") is not None
    assert provider.fetches == len(broken) + 1


async def test_failures_are_repeated_with_growing_pauses() -> None:
    provider = Provider("a")
    provider.away = True
    jwks = provider.cache()
    tried = []
    for second in range(64):
        before = provider.fetches
        with pytest.raises(Unavailable):
            await jwks.find("a", "ES256")
        if provider.fetches > before:
            tried.append(second)
        provider.now += 1
    assert tried == [0, 1, 3, 7, 15, 31, 61]


async def test_without_an_id_the_only_key_is_meant() -> None:
    one, two = Provider(None), Provider("a", "b")
    assert await one.cache().find(None, "ES256") is not None
    assert await two.cache().find(None, "ES256") is None
    doubled = Provider("a", "a")
    assert await doubled.cache().find("a", "ES256") is None, "an ambiguous id is not guessed"


async def test_a_key_fits_its_own_kind_of_algorithm_only() -> None:
    jwks = Provider("a").cache()
    assert await jwks.find("a", "ES256") is not None
    for algorithm in ("RS256", "PS256", "ES384", "EdDSA"):
        assert await jwks.find("a", algorithm) is None


async def test_a_key_that_names_its_algorithm_serves_no_other() -> None:
    provider = Provider()
    public = rsa.generate_private_key(65537, 2048).public_key()
    members = json.loads(RSAAlgorithm.to_jwk(public))
    provider.document = json.dumps({"keys": [{**members, "kid": "r", "alg": "RS256"}]}).encode()
    jwks = provider.cache()
    assert await jwks.find("r", "RS256") is not None
    assert await jwks.find("r", "RS512") is None
    assert await jwks.find("r", "PS256") is None


@asynccontextmanager
async def http(answer: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks"


async def test_over_http_only_a_plain_answer_of_sane_size_counts() -> None:
    document = json.dumps({"keys": [jwk("a")]}).encode()
    head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n"
    good = head % (b"200 OK", len(document), b"") + document
    async with http(good) as url:
        jwks = Jwks(Issuer("i", ("a",), jwks_url=url))
        assert await jwks.find("a", "ES256") is not None
        redirect = head % (b"302 Found", 0, b"location: " + url.encode() + b"\r\n")
        for bad in (
            redirect,
            head % (b"404 Not Found", len(document), b"") + document,
            head % (b"200 OK", len(document), b"content-encoding: gzip\r\n") + document,
            head % (b"200 OK", 2 * MAX_JWKS_BYTES, b"") + b" " * 2 * MAX_JWKS_BYTES,
            b"not http at all\r\n\r\n",
        ):
            async with http(bad) as bad_url:
                with pytest.raises(Unavailable):
                    await Jwks(Issuer("i", ("a",), jwks_url=bad_url)).find("a", "ES256")


async def test_a_file_is_read_again_when_it_is_old(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    issuer = Issuer("i", ("a",), jwks_file=file, soft_ttl_s=0.0)
    jwks = Jwks(issuer)
    with pytest.raises(Unavailable):
        await jwks.find("a", "ES256")
    file.write_text(json.dumps({"keys": [jwk("a")]}))
    assert await Jwks(issuer).find("a", "ES256") is not None
