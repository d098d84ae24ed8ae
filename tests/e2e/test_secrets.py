"""Neither credentials nor what tenants write reaches answers to others, logs or traces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import Mesh

KEY, TEXT = "sk-CANARY-91b7", "canaryprompt4711"


def seen(state: Path, canary: str) -> list[str]:
    """Files of the state directory that hold the text; what clients asked to keep is kept where it belongs."""
    return [
        str(path.relative_to(state))
        for path in state.rglob("*")
        if path.is_file()
        and path.relative_to(state).parts[0] != "responses"
        and canary.encode() in path.read_bytes()
    ]


async def test_canaries_stay_where_they_were_sent(mesh: Mesh) -> None:  # B101
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        for headers in (
            {"authorization": f"Bearer {KEY}"},
            {"authorization": KEY},
            {"x-api-key": KEY},
            {"authorization": f"Basic {KEY}"},
        ):
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses/resp_1", "/nowhere"):
                refused = await client.post(f"{path}?key={KEY}", json={"prompt": TEXT}, headers=headers)
                assert refused.status_code == 401
                assert KEY not in refused.text
    said = [{"role": "user", "content": TEXT}]
    asked: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", {"model": "script", "messages": said}, 200),
        (
            "/v1/chat/completions",
            {"model": "script", "messages": said, "metadata": {"script_fail_at": "2"}},
            500,
        ),
        ("/v1/chat/completions", {"model": "script", "messages": said, "temperature": TEXT}, 400),
        ("/v1/chat/completions", {"model": "nowhere", "messages": said}, 404),
        ("/v1/completions", {"model": "script", "prompt": TEXT, "echo": True, "logprobs": 1}, 200),
        ("/v1/completions", {"model": "script", "prompt": TEXT * 10_000}, 400),
        ("/v1/completions", {"model": "script", "prompt": TEXT * 600_000}, 413),
        ("/v1/responses", {"model": "script", "input": TEXT}, 200),
        ("/v1/messages", {"model": "script", "messages": said, "max_tokens": 9}, 200),
        ("/tokenize", {"model": "script", "prompt": TEXT}, 200),
    ]
    async with mesh.client() as client:
        for path, body, status in asked:
            answer = await client.post(path, json=body)
            assert answer.status_code == status, (path, answer.text[:200])
            if status != 200:
                assert TEXT not in answer.text, path
    # Traces and logs are written a moment later.
    await asyncio.sleep(2)
    assert seen(mesh.state, KEY) == []
    assert seen(mesh.state, TEXT) == []
    assert mesh.key not in "".join(
        path.read_text(errors="replace") for path in (mesh.state / "logs").iterdir() if path.is_file()
    )
