"""Kept responses by their id: read, delete, cancel, list their input; and counting what an input would be."""

from __future__ import annotations

import json
from typing import Any

from mesh.errors import InvalidRequest, NotFound
from router.kept import KeptResponse, KeptResponses, KeptState
from router.openai.responses.request import ResponsesRequest
from router.openai.unary import Call

LIMIT_DEFAULT, LIMIT_MAX = 20, 100


async def retrieve(call: Call) -> dict[str, Any]:
    """The response as it is now; raises NotFound."""
    for name, value in call.query:
        if name == "stream" and value == "false":
            continue
        if name not in ("include", "include[]", "include_obfuscation"):
            raise _unsupported(name)
    return _shown(await _get(call))


async def delete(call: Call) -> dict[str, Any]:
    """Raises NotFound."""
    kept = await _get(call)
    await _store(call).delete(call.caller.organisation, kept.id)
    return {"id": kept.id, "object": "response", "deleted": True}


async def cancel(call: Call) -> dict[str, Any]:
    """Raises NotFound, and InvalidRequest for a response that nobody works on in the background."""
    kept = await _get(call)
    return _shown(await _store(call).cancel(call.caller.organisation, kept.id))


async def input_items(call: Call) -> dict[str, Any]:
    """The items of this request, not those of the conversation before it; newest first unless asked."""
    kept = await _get(call)
    items = json.loads(kept.input_items)
    order, after, limit = "desc", None, LIMIT_DEFAULT
    for name, value in call.query:
        if name == "order" and value in ("asc", "desc"):
            order = value
        elif name == "limit" and value.isdigit() and 1 <= int(value) <= LIMIT_MAX:
            limit = int(value)
        elif name == "after":
            after = value
        elif name not in ("include", "include[]"):
            raise _unsupported(name)
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest("Invalid 'after': no such item.", code="invalid_value", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


async def input_tokens(call: Call) -> dict[str, Any]:
    """How many tokens a request's input is."""
    body = await call.body()
    reading = ResponsesRequest({**body, "store": False})
    admitted = await call.admit(reading.model)
    reading.read()
    ask = await call.unless_gone(reading.ask(call.core, admitted))
    return {"object": "response.input_tokens", "input_tokens": len(ask.prompts[0])}


async def _get(call: Call) -> KeptResponse:
    response_id = call.path["response_id"]
    kept = await _store(call).get(call.caller.organisation, response_id)
    models = call.caller.models
    if models is not None and "*" not in models and json.loads(kept.response)["model"] not in models:
        # A credential that may not use the model may not read what it said.
        raise NotFound(f"Response with id '{response_id}' not found.")
    return kept


def _store(call: Call) -> KeptResponses:
    kept = call.core.kept
    if kept is None:
        raise NotFound("Responses are not kept here.")
    return kept


def _shown(kept: KeptResponse) -> dict[str, Any]:
    response: dict[str, Any] = json.loads(kept.response)
    if kept.state is KeptState.CANCELLED:
        response["status"] = "cancelled"
    elif kept.state is KeptState.LOST:
        response["status"] = "failed"
        response["error"] = {"code": "server_error", "message": "The worker of this response was lost."}
    return response


def _unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"Unsupported query parameter or value: '{name[:64]}'.", code="unsupported_parameter", param=name[:64]
    )
