"""Whether a value is what OpenAI's specification says it is."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.specification.extract import EXTRACT

EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.queued": "ResponseQueuedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "error": "ResponseErrorEvent",
}


@cache
def _validator(name: str) -> Any:
    schema = {"$ref": f"spec#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(schema, registry=_registry())


@cache
def _registry() -> Any:
    document = json.loads(EXTRACT.read_text(encoding="utf-8"))
    resource = Resource.from_contents(document, default_specification=DRAFT202012)
    return Registry().with_resource("spec", resource)


def check(name: str, value: Any) -> None:
    """Raises AssertionError with the places that are wrong."""
    errors = list(_validator(name).iter_errors(value))
    assert not errors, [(list(error.absolute_path), error.message[:300]) for error in errors]


def check_event(event: dict[str, Any]) -> None:
    """A typed event of a response's stream."""
    check(EVENTS[event["type"]], event)
