"""The ASGI application: every route of the OpenAI face, all behind the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.errors import InvalidRequest, NotFound
from router.core.core import Core
from router.core.identity import Verifier
from router.openai import chat, completions, errors
from router.openai.answers import Connection, send_json
from router.openai.anthropic import request as anthropic
from router.openai.anthropic.errors import send_error as send_messages_error
from router.openai.anthropic.request import MessagesRequest
from router.openai.catalogue import list_models, retrieve_model
from router.openai.chat import ChatRequest
from router.openai.completions import CompletionRequest
from router.openai.document import document
from router.openai.embeddings import embed
from router.openai.envoy_spans import EnvoySpans
from router.openai.generate import Generate
from router.openai.guard import EDGE_ONLY, Guard, arrival_of
from router.openai.responses import kept
from router.openai.responses.request import ID_PREFIX, ResponsesRequest
from router.openai.tokens import detokenize, tokenize
from router.openai.unary import Call, Unary, Work

# What /readyz says; ready if "ready" is true.
Readiness = Callable[[], dict[str, Any]]


def openai_app(core: Core, verifier: Verifier, spans: EnvoySpans, readiness: Readiness) -> ASGIApp:
    """The application to serve."""
    app = Starlette(routes=_routes(core, spans, readiness), exception_handlers=_HANDLERS)
    # A path is itself and no other: no redirects to one that is nearly the same.
    app.router.redirect_slashes = False
    return Guard(app, verifier)


def _routes(core: Core, spans: EnvoySpans, readiness: Readiness) -> list[Route]:
    chat_endpoint = Generate(core, "POST /v1/chat/completions", ChatRequest, chat.ID_PREFIX)
    completion_endpoint = Generate(core, "POST /v1/completions", CompletionRequest, completions.ID_PREFIX)
    responses_endpoint = Generate(core, "POST /v1/responses", ResponsesRequest, ID_PREFIX)
    messages_endpoint = Generate(
        core, "POST /v1/messages", MessagesRequest, anthropic.ID_PREFIX, send_error=send_messages_error
    )
    counting = Unary(
        core, "POST /v1/messages/count_tokens", anthropic.count_tokens, send_error=send_messages_error
    )
    (spans_path,) = EDGE_ONLY
    return [
        Route("/v1/chat/completions", chat_endpoint, methods=["POST"]),
        Route("/v1/completions", completion_endpoint, methods=["POST"]),
        Route("/v1/models", Unary(core, "GET /v1/models", list_models), methods=["GET"]),
        Route("/v1/models/{model:path}", Unary(core, "GET /v1/models", retrieve_model), methods=["GET"]),
        Route("/v1/embeddings", Unary(core, "POST /v1/embeddings", embed), methods=["POST"]),
        Route("/v1/responses", responses_endpoint, methods=["POST"]),
        *_by_id(core),
        Route("/v1/messages", messages_endpoint, methods=["POST"]),
        Route("/v1/messages/count_tokens", counting, methods=["POST"]),
        Route("/openapi.json", Unary(core, "GET /openapi.json", _document), methods=["GET"]),
        Route("/tokenize", Unary(core, "POST /tokenize", tokenize), methods=["POST"]),
        Route("/detokenize", Unary(core, "POST /detokenize", detokenize), methods=["POST"]),
        Route(spans_path, spans, methods=["POST"]),
        Route("/healthz", Health(lambda: {"ready": True}), methods=["GET"]),
        Route("/readyz", Health(readiness), methods=["GET"]),
    ]


async def _document(call: Call) -> dict[str, Any]:
    """What is served."""
    return document()


def _by_id(core: Core) -> list[Route]:
    """What can be done with kept responses."""
    path = "/v1/responses/{response_id}"
    endpoints: list[tuple[str, str, Work]] = [
        ("POST", "/v1/responses/input_tokens", kept.input_tokens),
        ("GET", path, kept.retrieve),
        ("DELETE", path, kept.delete),
        ("POST", f"{path}/cancel", kept.cancel),
        ("GET", f"{path}/input_items", kept.input_items),
    ]
    return [
        Route(at, Unary(core, f"{method} {at}", work), methods=[method]) for method, at, work in endpoints
    ]


class Health:
    """200 or 503, and why."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._readiness()
        ready = bool(state.pop("ready"))
        body = {"status": "ok" if ready else "unavailable", **state}
        connection = Connection(receive, send)
        headers = arrival_of(scope).headers()
        await send_json(connection, 200 if ready else 503, msgspec.json.encode(body), headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router of Starlette refuses: an unknown path, a method that a path has not."""
    assert isinstance(error, HTTPException)
    shown = f"{request.method} {request.url.path}"[:128]
    if error.status_code == 405:
        told: InvalidRequest | NotFound = InvalidRequest(f"Not allowed: {shown}.", code="method_not_allowed")
    else:
        told = NotFound(f"Invalid URL ({shown})", code="unknown_url")
    headers = dict(arrival_of(request.scope).headers()) | dict(error.headers or {})
    return Response(errors.body(told), error.status_code, headers, "application/json")


_HANDLERS: dict[Any, Any] = {404: _http_error, 405: _http_error}
