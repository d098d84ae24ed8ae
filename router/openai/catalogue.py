"""`GET /v1/models` and `/v1/models/{id}`: what the caller may use, by the decision that calls go through."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from mesh.errors import MeshError
from router.core.core import Core
from router.core.exchange import Exchange
from router.core.policy import CatalogueModel
from router.openai.answers import Connection, mesh_error, send_error, send_json
from router.openai.guard import arrival_of


class Catalogue:
    """Both endpoints; the path parameter `model` tells them apart."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = arrival_of(scope)
        connection = Connection(receive, send)
        exchange = Exchange(
            self._core.books,
            "GET /v1/models",
            arrival.request_id,
            start_ns=arrival.edge_start_ns,
            traceparent=arrival.traceparent,
        )
        failure: MeshError | None = None
        try:
            caller = self._core.identify(exchange, arrival.identity_token)
            data = msgspec.json.encode(self._answer(exchange, scope.get("path_params", {}).get("model")))
            await send_json(connection, 200, data, arrival.headers(caller.organisation))
        except Exception as error:
            failure = mesh_error(error)
            await send_error(connection, failure, arrival.headers())
        finally:
            exchange.settle(error=failure)

    def _answer(self, exchange: Exchange, model: str | None) -> dict[str, Any]:
        if model is not None:
            return _model(self._core.model(exchange, model))
        return {"object": "list", "data": [_model(entry) for entry in self._core.models(exchange)]}


def _model(model: CatalogueModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owned_by}
