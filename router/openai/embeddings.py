"""`POST /v1/embeddings`: texts or token ids in, vectors out.

| field | here |
|---|---|
| input | a text, token ids, or up to 2,048 of either; none empty; 300,000 tokens in all |
| encoding_format | `float`, or `base64` of little-endian float32 |
| dimensions | the first so many numbers, normalised again |
| user | accepted |

Token ids are taken as they are where they have the model's begin and end tokens, and get
them otherwise, so that a text and its ids have one vector.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from mesh.errors import InvalidRequest
from router.core.core import Admitted, Core
from router.openai import parameters
from router.openai.completions import token_ids
from router.openai.fields import Fields, wrong_type
from router.openai.unary import Call

FORMATS = ("float", "base64")

Text = str | list[int]


async def embed(call: Call) -> dict[str, Any]:
    """The answer; raises InvalidRequest."""
    fields = Fields(await call.body())
    model = parameters.model_of(fields)
    admitted = await call.admit(model)
    inputs = _inputs(fields)
    form = fields.string("encoding_format") or "float"
    if form not in FORMATS:
        raise InvalidRequest(
            f"Invalid value: 'encoding_format'. Supported values are: {', '.join(FORMATS)}.",
            code="invalid_value",
            param="encoding_format",
        )
    dimensions = fields.integer("dimensions")
    fields.string("user")
    fields.end()
    check_dimensions(admitted, dimensions)
    prompts = await call.unless_gone(encoded(call.core, admitted, inputs))
    vectors = await call.unless_gone(call.core.embed(admitted, prompts))
    shown = [shortened(vector, dimensions) for vector in vectors]
    tokens = call.exchange.usage.prompt_tokens
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if form == "base64" else _numbers(vector),
            }
            for index, vector in enumerate(shown)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


async def encoded(core: Core, admitted: Admitted, inputs: Sequence[Text]) -> list[list[int]]:
    """The ids of each input, as its text would have them."""
    frame = await core.encode(admitted, "")

    async def one(text: Text) -> list[int]:
        if isinstance(text, str):
            return await core.encode(admitted, text) if text else []
        begin, end = frame[:1], frame[1:]
        whole = text[:1] == begin and (not end or text[-len(end) :] == end)
        return text if whole or not text else [*begin, *text, *end]

    return list(await asyncio.gather(*[one(text) for text in inputs]))


def check_dimensions(admitted: Admitted, dimensions: int | None) -> None:
    """Raises InvalidRequest for more than the model has, or for none."""
    most = admitted.model.text.dimensions or 1
    if dimensions is not None and not 1 <= dimensions <= most:
        raise InvalidRequest(
            f"Invalid 'dimensions': expected a value from 1 to {most}, but got {dimensions} instead.",
            code="integer_below_min_value" if dimensions < 1 else "integer_above_max_value",
            param="dimensions",
        )


def shortened(vector: array[float], dimensions: int | None) -> array[float]:
    """The first numbers, of length 1 again."""
    if dimensions is None or dimensions == len(vector):
        return vector
    first = vector[:dimensions]
    length = sum(number * number for number in first) ** 0.5 or 1.0
    return array("f", [number / length for number in first])


def _inputs(fields: Fields) -> list[Text]:
    raw = fields.required("input")
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list):
        raise wrong_type("input", "a string or an array", raw)
    if not raw:
        raise InvalidRequest("Invalid 'input': empty array.", code="empty_array", param="input")
    if isinstance(raw[0], (str, list)):
        return [_input(f"input[{place}]", item, type(raw[0])) for place, item in enumerate(raw)]
    return [token_ids("input", raw)]


def _input(place: str, raw: Any, kind: type) -> Text:
    if not isinstance(raw, kind):
        raise wrong_type(place, "the same kind of input as the first", raw)
    if isinstance(raw, list):
        return token_ids(place, raw) if raw else []
    return str(raw)


def _numbers(vector: array[float]) -> list[float]:
    # Nine digits are what a float32 holds.
    return [float(f"{number:.9g}") for number in vector]


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
