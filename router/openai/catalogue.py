"""`GET /v1/models` and `/v1/models/{id}`: what the caller may use, by the decision that calls go through."""

from __future__ import annotations

from typing import Any

from router.core.policy import CatalogueModel
from router.openai.unary import Call


async def list_models(call: Call) -> dict[str, Any]:
    """All of them."""
    return {"object": "list", "data": [_model(entry) for entry in call.core.models(call.exchange)]}


async def retrieve_model(call: Call) -> dict[str, Any]:
    """The one of the path; raises ModelNotFound."""
    return _model(call.core.model(call.exchange, call.path["model"]))


def _model(model: CatalogueModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owned_by}
