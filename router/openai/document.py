"""What is really served, as one table: the OpenAPI document and the page of fields are made from it.

`python -m router.openai.document` writes both to `docs/`; a test holds them, and the table,
against the server. A field is *supported* (as OpenAI or Anthropic define it), an *extension*,
*accepted* (it changes nothing about the answer) or *refused* with 400, `param` naming it. A name
that is not here is refused as well. It reads no requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["supported", "extension", "accepted", "refused"]
Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
ANY: Schema = {}
TEXTS: Schema = {"type": "array", "items": TEXT}


def whole(least: int, most: int | None = None) -> Schema:
    """An integer within bounds."""
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def decimal(least: float, most: float) -> Schema:
    """A number within bounds."""
    return {"type": "number", "minimum": least, "maximum": most}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request."""

    name: str
    status: Status
    schema: Schema = field(default_factory=dict)
    note: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `answer` are the names that an answer always has."""

    method: str
    path: str
    summary: str
    answer: Sequence[str]
    fields: Sequence[Field] = ()
    streams: bool = False
    query: Sequence[str] = ()


def _each(status: Status, schema: Schema, *names: str, note: str = "") -> list[Field]:
    return [Field(name, status, schema, note) for name in names]


_MODEL = Field("model", "supported", TEXT, "a model of `/v1/models`", needed=True)
_STOP: Schema = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 4}]}
_SAMPLING = [
    Field("temperature", "supported", decimal(0, 2)),
    Field("top_p", "supported", decimal(0, 1)),
    Field("presence_penalty", "supported", decimal(-2, 2)),
    Field("frequency_penalty", "supported", decimal(-2, 2)),
    Field("logit_bias", "supported", OBJECT, "at most 300 token ids, each -100 to 100"),
    Field("seed", "supported", {"type": "integer"}, "the same seed gives the same answer"),
    Field("stop", "supported", _STOP, "at most 4, of 1 to 1,024 characters"),
    Field("n", "supported", whole(1, 128)),
    Field("stream", "supported", FLAG),
    Field("stream_options", "supported", OBJECT, "`include_usage`; `include_obfuscation` adds nothing"),
    Field("top_k", "extension", {"type": "integer"}, "0 and -1 are off"),
    Field("min_p", "extension", decimal(0, 1)),
    Field("repetition_penalty", "extension", decimal(0, 100)),
    Field("min_tokens", "extension", whole(0)),
    Field("stop_token_ids", "extension", {"type": "array", "items": {"type": "integer"}}),
    Field("ignore_eos", "extension", FLAG),
]
_HARMLESS = [
    Field("metadata", "accepted", OBJECT, "at most 16 pairs of strings"),
    *_each(
        "accepted", ANY, "user", "store", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"
    ),
    Field("service_tier", "accepted", TEXT, "everything is served as `default`"),
    Field("safety_identifier", "accepted", {"type": "string", "maxLength": 64}),
]
_STRUCTURED = [
    Field("structured_outputs", "extension", OBJECT, "see [tools](tools.md)"),
    *_each("extension", ANY, "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
]

_CHAT = [
    _MODEL,
    Field("messages", "supported", LIST, "text parts only", needed=True),
    Field("max_completion_tokens", "supported", whole(1), "wins over `max_tokens`"),
    Field("max_tokens", "supported", whole(1), "0 is refused"),
    *_SAMPLING,
    Field("logprobs", "supported", FLAG),
    Field("top_logprobs", "supported", whole(0, 20), "needs `logprobs`"),
    *_each(
        "supported", ANY, "tools", "tool_choice", "functions", "function_call", note="see [tools](tools.md)"
    ),
    Field("parallel_tool_calls", "supported", FLAG),
    Field("response_format", "supported", OBJECT, "see [tools](tools.md)"),
    Field("reasoning_effort", "supported", TEXT, "where the chat template knows it"),
    Field("chat_template_kwargs", "extension", OBJECT),
    *_STRUCTURED,
    Field("modalities", "supported", LIST, "`text` only"),
    *_HARMLESS,
    *_each("refused", OBJECT, "audio", "prediction", "web_search_options", "moderation"),
    Field("verbosity", "refused", TEXT),
]
_COMPLETIONS = [
    _MODEL,
    Field("prompt", "supported", ANY, "a text, texts, token ids, or lists of them; at most 128", needed=True),
    Field(
        "max_tokens", "supported", whole(0), "16 if absent; 0 with `echo` only: the prompt and nothing else"
    ),
    *_SAMPLING,
    Field("logprobs", "supported", whole(0, 5), "with `echo` of the prompt as well"),
    Field("echo", "supported", FLAG, "a prompt that is scored uses no cache"),
    Field("best_of", "supported", whole(1, 20), "by the mean log-probability; not with `stream`"),
    Field(
        "suffix", "supported", TEXT, "where the model can fill in the middle, else refused; not with `echo`"
    ),
    *_STRUCTURED,
    Field("response_format", "extension", OBJECT),
    *_HARMLESS,
]
_EMBEDDINGS = [
    _MODEL,
    Field("input", "supported", ANY, "a text, token ids, or up to 2,048 of either; none empty", needed=True),
    Field("encoding_format", "supported", {"enum": ["float", "base64"]}),
    Field("dimensions", "supported", whole(1), "the first so many, normalised again"),
    Field("user", "accepted", TEXT),
]
_RESPONSES = [
    _MODEL,
    Field(
        "input",
        "supported",
        ANY,
        "a text, or items: messages (text), calls, their outputs, reasoning",
        needed=True,
    ),
    Field("instructions", "supported", TEXT, "the system message; not passed on to later responses"),
    Field("previous_response_id", "supported", TEXT),
    Field("store", "supported", FLAG, "true if absent; for 30 days, within the organisation"),
    Field("max_output_tokens", "supported", whole(16)),
    Field("temperature", "supported", decimal(0, 2)),
    Field("top_p", "supported", decimal(0, 1)),
    Field("top_logprobs", "supported", whole(0, 20)),
    Field(
        "include",
        "supported",
        TEXTS,
        "`message.output_text.logprobs`, `reasoning.encrypted_content` (there is none)",
    ),
    Field("tools", "supported", LIST, "functions"),
    Field("tool_choice", "supported", ANY),
    Field("parallel_tool_calls", "supported", FLAG),
    Field("text", "supported", OBJECT, "`format` as chat's `response_format`"),
    Field("reasoning", "supported", OBJECT, "`effort` as chat's `reasoning_effort`"),
    Field("stream", "supported", FLAG),
    Field("stream_options", "supported", OBJECT),
    Field("seed", "extension", {"type": "integer"}),
    Field("truncation", "supported", {"enum": ["disabled"]}, "`auto` is refused"),
    Field("max_tool_calls", "accepted", {"type": "integer"}, "it bounds built-in tools, and there are none"),
    *[each for each in _HARMLESS if each.name != "store"],
    Field("background", "refused", FLAG, "`false` is accepted"),
    *_each("refused", ANY, "conversation", "prompt", "context_management", "moderation"),
]
_MESSAGES = [
    _MODEL,
    Field("messages", "supported", LIST, "text, tool_use, tool_result and thinking blocks", needed=True),
    Field("max_tokens", "supported", whole(1), needed=True),
    Field("system", "supported", ANY, "a text or text blocks"),
    Field("temperature", "supported", decimal(0, 1)),
    Field("top_p", "supported", decimal(0, 1)),
    Field("top_k", "supported", {"type": "integer"}),
    Field("stop_sequences", "supported", TEXTS, "at most 4"),
    Field("stream", "supported", FLAG),
    Field("tools", "supported", LIST, "custom ones"),
    Field("tool_choice", "supported", OBJECT),
    Field("thinking", "accepted", OBJECT, "whether and how long it thinks is the model's own"),
    Field("metadata", "accepted", OBJECT),
    Field("service_tier", "accepted", TEXT),
    *_each(
        "refused", ANY, "container", "mcp_servers", "context_management", "output_config", "output_format"
    ),
]
_COUNTED = [each for each in _MESSAGES if each.name != "max_tokens"]
_TOKENIZE = [
    _MODEL,
    Field("prompt", "supported", TEXT, "this or `messages`"),
    Field("messages", "supported", LIST),
    Field("add_special_tokens", "supported", FLAG, "of a `prompt`; true if absent"),
    Field("return_token_strs", "supported", FLAG),
    Field("add_generation_prompt", "supported", {"enum": [True]}, "with `messages`"),
    *_each(
        "supported",
        ANY,
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        note="as in chat; with `messages`",
    ),
    Field("parallel_tool_calls", "supported", FLAG),
    Field("reasoning_effort", "supported", TEXT, "where the chat template knows it"),
    Field("chat_template_kwargs", "extension", OBJECT),
]
_DETOKENIZE = [_MODEL, Field("tokens", "supported", {"type": "array", "items": whole(0)}, needed=True)]
_RESPONSE = ("id", "object", "created_at", "status", "output", "usage")

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        "POST", "/v1/chat/completions", "A conversation goes on.",
        ("id", "object", "created", "model", "choices", "usage"), _CHAT, streams=True,
    ),
    Endpoint(
        "POST", "/v1/completions", "A text goes on.",
        ("id", "object", "created", "model", "choices", "usage"), _COMPLETIONS, streams=True,
    ),
    Endpoint("POST", "/v1/embeddings", "Vectors of texts.", ("object", "data", "model", "usage"), _EMBEDDINGS),
    Endpoint("POST", "/v1/responses", "An answer to items, kept if asked.", _RESPONSE, _RESPONSES, streams=True),
    Endpoint("POST", "/v1/responses/input_tokens", "What an input would be.", ("object", "input_tokens"), _RESPONSES),
    Endpoint("GET", "/v1/responses/{response_id}", "A kept response.", _RESPONSE, query=("include",)),
    Endpoint("DELETE", "/v1/responses/{response_id}", "It is kept no longer.", ("id", "object", "deleted")),
    Endpoint("POST", "/v1/responses/{response_id}/cancel", "Refused: nothing runs in the background.", _RESPONSE),
    Endpoint(
        "GET", "/v1/responses/{response_id}/input_items", "The items of its own request.",
        ("object", "data", "first_id", "last_id", "has_more"), query=("limit", "order", "after", "include"),
    ),
    Endpoint(
        "POST", "/v1/messages", "A conversation goes on, in Anthropic's dialect.",
        ("id", "type", "role", "model", "content", "stop_reason", "usage"), _MESSAGES, streams=True,
    ),
    Endpoint("POST", "/v1/messages/count_tokens", "What its input would be.", ("input_tokens",), _COUNTED),
    Endpoint("GET", "/v1/models", "The models that the caller may use.", ("object", "data")),
    Endpoint("GET", "/v1/models/{model}", "One of them.", ("id", "object", "created", "owned_by")),
    Endpoint("POST", "/tokenize", "The ids of a text.", ("count", "max_model_len", "tokens"), _TOKENIZE),
    Endpoint("POST", "/detokenize", "The text of ids.", ("prompt",), _DETOKENIZE),
    Endpoint("GET", "/openapi.json", "This document.", ("openapi", "paths")),
)  # fmt: skip

_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No credential, or none that is known.",
    "403": "The organisation may not.",
    "404": "No such thing, or none that the caller may see.",
    "413": "More than 8 MiB.",
    "429": "The caller's share is used up.",
    "500": "A fault of the mesh.",
    "503": "Try again after `retry-after`.",
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    error = {"type": "object", "required": ["error"], "properties": {"error": OBJECT}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": "v1"},
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def page() -> str:
    """The page of fields, in Markdown."""
    lines = [
        "# Endpoints and their fields",
        "",
        "Made by `python -m router.openai.document` from the table that [openapi.json](openapi.json) is made from;",
        "a test holds both against the server, which serves the document at `/openapi.json` (with a credential).",
        "",
        "*supported*: as OpenAI or Anthropic define it. *extension*: ours. *accepted*: changes nothing about the",
        "answer. *refused*: 400, and `param` names it, as for every name that is not here.",
    ]
    for endpoint in ENDPOINTS:
        lines += ["", f"## `{endpoint.method} {endpoint.path}`", "", endpoint.summary]
        if endpoint.fields:
            lines += ["", "| field | | |", "|---|---|---|"]
            lines += [f"| `{f.name}` | {f.status} | {_shown(f)} |" for f in endpoint.fields]
    return "\n".join(lines) + "\n"


def _shown(given: Field) -> str:
    schema = given.schema
    bounds = [f"{schema[name]:g}" if name in schema else "" for name in ("minimum", "maximum")]
    span = f"{bounds[0]} to {bounds[1]}" if bounds[1] else (f"from {bounds[0]}" if bounds[0] else "")
    return "; ".join(filter(None, ["needed" if given.needed else "", span, given.note]))


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "application/json": {"schema": {"type": "object", "required": list(endpoint.answer)}}
    }
    if endpoint.streams:
        answer["text/event-stream"] = {"schema": TEXT}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "parameters": [
            *_parameters("path", [p[1:-1] for p in endpoint.path.split("/") if p.startswith("{")]),
            *_parameters("query", endpoint.query),
        ],
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            **{status: _refusal(text) for status, text in _ERRORS.items()},
        },
    }
    if endpoint.fields:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _body(endpoint)}},
        }
    return operation


def _body(endpoint: Endpoint) -> dict[str, Any]:
    served = [each for each in endpoint.fields if each.status != "refused"]
    return {
        "type": "object",
        "required": [each.name for each in served if each.needed],
        "properties": {each.name: {**each.schema, "x-status": each.status} for each in served},
        "additionalProperties": False,
    }


def _parameters(place: str, names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": name, "in": place, "required": place == "path", "schema": TEXT} for name in names]


def _refusal(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def written(docs: Path) -> dict[Path, str]:
    """What `docs/` is to hold."""
    shown = json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    return {docs / "openapi.json": shown, docs / "endpoints.md": page()}


if __name__ == "__main__":
    for path, content in written(Path(__file__).resolve().parents[2] / "docs").items():
        path.write_text(content, encoding="utf-8")
