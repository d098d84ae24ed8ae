"""An answer as output items, and the typed events that tell how they come about.

One builder serves both modes: a whole answer is what the events of its one delta leave behind.
The parts of an answer become items in their order: reasoning, a message, calls. It does not
know where answers come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.core.request import Delta, Token
from router.openai.responses.items import new_id
from text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart

Event = dict[str, Any]


class Output:
    """`items` are the finished ones. `apart`: deltas carry parts; otherwise their text is the message."""

    def __init__(self, *, apart: bool, logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._apart = apart
        self._logprobs = logprobs
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._tokens: list[Token] = []
        self._shown: list[dict[str, Any]] = []

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events that a delta makes, without their numbers."""
        if self._logprobs:
            self._tokens += delta.tokens
        parts: Sequence[Part] = delta.parts if self._apart else [Text(delta.text)] if delta.text else []
        for part in parts:
            if isinstance(part, Text):
                yield from self._message(part.text)
            elif isinstance(part, Reasoning):
                yield from self._reasoning(part.text)
            elif isinstance(part, ToolCallStart):
                yield from self._call(part)
            elif isinstance(part, ToolCallArguments):
                yield from self._arguments(part.text)

    def end(self, *, complete: bool) -> Iterator[Event]:
        """Closes what is open; an answer without anything is an empty message."""
        if self._open is None and not self.items:
            yield from self._begin(_message())
        yield from self._close("completed" if complete else "incomplete")

    def _message(self, text: str) -> Iterator[Event]:
        if not self._is("message"):
            yield from self._begin(_message())
        self._text += text
        logprobs = [_logprob(token) for token in self._tokens]
        self._tokens = []
        self._shown += logprobs
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> Iterator[Event]:
        if not self._is("reasoning"):
            yield from self._begin({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []})
        self._text += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _call(self, part: ToolCallStart) -> Iterator[Event]:
        yield from self._begin(
            {
                "id": new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": part.id,
                "name": part.name,
                "arguments": "",
            }
        )

    def _arguments(self, text: str) -> Iterator[Event]:
        self._text += text
        if text:
            yield self._event("response.function_call_arguments.delta", delta=text)

    def _is(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._open, self._text, self._shown = item, "", []
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": item}
        if item["type"] != "function_call":
            yield self._event("response.content_part.added", content_index=0, part=self._part())

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        kind = item["type"]
        # Tokens that showed no text belong to what was said last.
        self._shown += [_logprob(token) for token in self._tokens] if kind == "message" else []
        self._tokens = [] if kind == "message" else self._tokens
        if kind == "function_call":
            yield self._event(
                "response.function_call_arguments.done", name=item["name"], arguments=self._text
            )
            item = {**item, "arguments": self._text, "status": status}
        else:
            part = self._part()
            said = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            extra = {"logprobs": self._shown} if kind == "message" else {}
            yield self._event(said, content_index=0, text=self._text, **extra)
            yield self._event("response.content_part.done", content_index=0, part=part)
            item = {**item, "content": [part], "status": status}
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open = None

    def _part(self) -> dict[str, Any]:
        if self._is("reasoning"):
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._shown}

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items), **fields}


def _message() -> dict[str, Any]:
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _logprob(token: Token) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw),
        "top_logprobs": [
            {"token": top.text, "logprob": top.logprob, "bytes": list(top.raw)} for top in token.top
        ],
    }
