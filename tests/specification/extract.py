"""Makes `openai.json`: of OpenAI's OpenAPI document only the schemas of the answers that are served here.

    python -m tests.specification.extract ../shared/cases/openai-openapi.json

The document is OpenAI's (https://github.com/openai/openai-openapi, MIT licence, version 2.3.0). Prose and
examples are left out. `nullable: true`, a word of OpenAPI 3.0 that JSON Schema does not know, becomes a
type of null beside the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXTRACT = Path(__file__).with_name("openai.json")
NAMED = "#/components/schemas/"
ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "ErrorResponse",
    "ListModelsResponse",
    "Model",
    "Response",
    "ResponseItemList",
    "TokenCountsResource",
    "ResponseCreatedEvent",
    "ResponseQueuedEvent",
    "ResponseInProgressEvent",
    "ResponseCompletedEvent",
    "ResponseIncompleteEvent",
    "ResponseFailedEvent",
    "ResponseErrorEvent",
    "ResponseOutputItemAddedEvent",
    "ResponseOutputItemDoneEvent",
    "ResponseContentPartAddedEvent",
    "ResponseContentPartDoneEvent",
    "ResponseTextDeltaEvent",
    "ResponseTextDoneEvent",
    "ResponseReasoningTextDeltaEvent",
    "ResponseReasoningTextDoneEvent",
    "ResponseFunctionCallArgumentsDeltaEvent",
    "ResponseFunctionCallArgumentsDoneEvent",
)
_PROSE = frozenset({"description", "title", "example", "examples", "deprecated", "nullable"})
# Below these, names are a schema's own and no words of JSON Schema.
_MAPS = frozenset({"properties", "$defs"})


def extract(document: dict[str, Any]) -> dict[str, Any]:
    """The schemas that answers need, by name."""
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _lean(schemas[name])
            waiting += _references(found[name])
    return dict(sorted(found.items()))


def _lean(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_lean(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    lean: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _MAPS:
            lean[word] = {name: _lean(inner) for name, inner in value.items()}
        elif word not in _PROSE and not word.startswith("x-"):
            lean[word] = value if word in ("enum", "const", "default", "required") else _lean(value)
    return _with_null(lean) if schema.get("nullable") is True else lean


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for word, value in schema.items():
            if word == "$ref" and isinstance(value, str):
                yield value.removeprefix(NAMED)
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def written(schemas: dict[str, Any]) -> str:
    """One schema to a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in schemas.items()]
    about = {
        "source": "https://github.com/openai/openai-openapi",
        "version": "2.3.0",
        "licence": "MIT, Copyright (c) OpenAI",
        "made by": "python -m tests.specification.extract",
    }
    return (
        '{"about": ' + json.dumps(about) + ',\n"components": {"schemas": {\n' + ",\n".join(lines) + "\n}}}\n"
    )


if __name__ == "__main__":
    EXTRACT.write_text(written(extract(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
