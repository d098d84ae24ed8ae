"""Splits what a model thinks from what it says, by the marks of its kind.

| name | marks |
|---|---|
| think | `<think>` … `</think>` (DeepSeek R1, Qwen 3, and most others) |
| mistral | `[THINK]` … `[/THINK]` |

Thinking is looked for at the beginning of an answer only. Chat templates that open it themselves leave it
open in the prompt; `open_in` tells. Knows nothing of tools.
"""

from __future__ import annotations

from collections.abc import Mapping

from text.tool_parsers.reading import Reader, Sink, Source

MARKS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


def reasoning_of(template: str | None) -> str | None:
    """The marks that a chat template knows, None if it knows none."""
    for name, (_, end) in MARKS.items():
        if template is not None and end in template:
            return name
    return None


def open_in(prompt: str, name: str) -> bool:
    """Whether the prompt ends inside of thinking, so that the answer goes on with it."""
    begin, end = MARKS[name]
    return prompt.rfind(begin) > prompt.rfind(end) and prompt.rstrip().endswith(begin)


def read(source: Source, sink: Sink, name: str, *, opened: bool) -> Reader[None]:
    """Takes the thinking off the beginning of an answer; the white space around it is dropped."""
    begin, end = MARKS[name]
    if not opened:
        space = yield from source.skip_space()
        if not (yield from source.begins(begin)):
            source.put_back(space)
            return
    sink.thinking = True
    yield from source.skip_space()
    yield from source.until([end], sink.reasoning)
    sink.thinking = False
    yield from source.skip_space()
