"""The document of what is served says the truth: routes, fields, and the files in `docs/`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from response_store.options import ShelfOptions
from router.openai.app import _routes
from router.openai.document import ENDPOINTS, Endpoint, document, written
from router.openai.guard import EDGE_ONLY, OPEN
from tests.router.world import World, world

DOCS = Path(__file__).resolve().parents[2] / "docs"
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0, kept=ShelfOptions()) as made:
        yield made


def test_the_files_are_those_of_the_table() -> None:
    for path, content in written(DOCS).items():
        assert path.read_text(encoding="utf-8") == content, "run: python -m router.openai.document"


async def test_every_route_is_documented_and_no_other(mesh: World) -> None:
    served = {
        (method, route.path.replace("{model:path}", "{model}"))
        for route in _routes(mesh.router.core, mesh.router.spans, mesh.router.readiness)
        if isinstance(route, Route) and route.path not in OPEN | EDGE_ONLY
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    answer = await mesh.client.get("/openapi.json", headers=mesh.headers())
    assert answer.json() == document()


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.path in GOOD], ids=lambda e: e.path)
async def test_fields_are_known_or_refused_as_documented(mesh: World, endpoint: Endpoint) -> None:
    good = {"model": "tiny", **GOOD[endpoint.path]}
    answer = await mesh.post(endpoint.path, good)
    assert answer.status_code == 200, answer.text
    assert set(endpoint.answer) <= set(answer.json())
    for field in endpoint.fields:
        # A value of a type that no field has: whoever knows the field says so, or takes anything.
        refused = await mesh.post(endpoint.path, {**good, field.name: {"\x00": [0.5]}})
        text = refused.text
        if field.status == "refused":
            assert refused.status_code == 400, field.name
            assert field.name in text
        assert refused.status_code in (200, 400), (field.name, text)
        assert f'supplied: {field.name}"' not in text, field.name
    unknown = await mesh.post(endpoint.path, {**good, "nonsense": 1})
    assert unknown.status_code == 400
    assert "nonsense" in unknown.text
