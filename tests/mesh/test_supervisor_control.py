"""The control channel: one question, events, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mesh.supervisor.control import ControlError, ControlServer, Emit, ask, ask_once


async def test_events_come_before_the_answer(tmp_path: Path) -> None:
    async def count(request: Mapping[str, Any], emit: Emit) -> Mapping[str, Any]:
        for number in range(request["to"]):
            emit({"event": "number", "is": number})
        return {"counted": request["to"]}

    async def refuse(_: Mapping[str, Any], __: Emit) -> Mapping[str, Any]:
        raise ControlError("not today")

    path = tmp_path / "control.sock"
    server = ControlServer(path, {"count": count, "refuse": refuse})
    await server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [line async for line in ask(path, "count", to=2)]
    assert lines == [{"event": "number", "is": 0}, {"event": "number", "is": 1}, {"ok": {"counted": 2}}]
    with pytest.raises(ControlError, match="not today"):
        await ask_once(path, "refuse")
    with pytest.raises(ControlError, match="unknown command"):
        await ask_once(path, "explode")
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"not json\n")
    assert await reader.read() == b""
    writer.close()
    await server.close()
    with pytest.raises(ControlError, match="no mesh is running"):
        await ask_once(path, "count", to=1)
