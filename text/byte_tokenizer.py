"""The tokenizer and the chat format of the models that need no file: `tiny:` and `script:`.

One id per byte, and five control tokens. A conversation is written as `<|role|>content<|end|>` per message,
with `<|assistant|>` at the end. The text of every message survives exactly, whatever it holds: where it looks
like a marker (`<|user|>`) it is rendered with one bar more (`<||user|>`), which the tokenizer takes away
again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from text.errors import TemplateError
from text.messages import normalise
from text.tokenizer import scalar_text

BOS_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(256, 261)
VOCAB_SIZE = 272  # padded: ids above 260 exist in the model's output and stand for nothing
SCRIPT_CONTEXT_LENGTH = 32768
TINY_CONTEXT_LENGTH = 4096  # where `tiny:context=N` does not say otherwise

_CONTROL_IDS = {
    "bos": BOS_ID,
    "end": END_ID,
    "system": SYSTEM_ID,
    "user": USER_ID,
    "assistant": ASSISTANT_ID,
}
_CONTROL_TEXTS = {token_id: f"<|{name}|>" for name, token_id in _CONTROL_IDS.items()}
_MARKER = re.compile(r"<(\|+)(" + "|".join(_CONTROL_IDS) + r")\|>")
# Roles without a marker of their own speak as the system, so that the last user message stays the user's.
_MARKER_OF_ROLE = {
    "system": "system",
    "developer": "system",
    "tool": "system",
    "function": "system",
    "user": "user",
    "assistant": "assistant",
}


class ByteTokenizer:
    """Ids 0 to 255 are bytes. `bos_id` exists, but is not added."""

    vocab_size: int = VOCAB_SIZE
    bos_id: int | None = BOS_ID
    add_bos: bool = False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """See `text.tokenizer.Tokenizer`. `add_special` changes nothing here."""
        text = scalar_text(text)
        if not parse_special:
            return list(text.encode())
        ids: list[int] = []
        plain = 0
        for marker in _MARKER.finditer(text):
            ids += text[plain : marker.start()].encode()
            plain = marker.end()
            bars, name = marker.groups()
            if len(bars) == 1:
                ids.append(_CONTROL_IDS[name])
            else:
                ids += f"<{bars[1:]}{name}|>".encode()
        ids += text[plain:].encode()
        return ids

    def piece(self, token_id: int) -> bytes:
        """The byte; b"" for control tokens and for the padding of the vocabulary."""
        if not 0 <= token_id < VOCAB_SIZE:
            raise IndexError(f"token id {token_id}")
        return bytes([token_id]) if token_id < 256 else b""

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the name of the control token."""
        return _CONTROL_TEXTS.get(token_id, "").encode() or self.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; U+FFFD for a byte that is only part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")


class ByteChatTemplate:
    """`<|role|>content<|end|>` per message; tools and calls are written as JSON."""

    names: frozenset[str] = frozenset({"messages", "tools"})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """See `text.chat_template.ChatTemplate`. `variables` change nothing here."""
        out: list[str] = []
        if tools:
            out.append(_turn("system", _json(list(tools))))
        for index, message in enumerate(normalise(messages)):
            role = message.get("role")
            marker = _MARKER_OF_ROLE.get(role) if isinstance(role, str) else None
            if marker is None:
                raise TemplateError(f"messages[{index}]: role {role!r} is not supported by this model")
            calls = message.get("tool_calls")
            out.append(_turn(marker, message["content"] + (_json(calls) if calls else "")))
        if add_generation_prompt:
            out.append("<|assistant|>")
        return "".join(out)


def _turn(marker: str, text: str) -> str:
    return f"<|{marker}|>{_MARKER.sub(_one_bar_more, text)}<|end|>"


def _one_bar_more(marker: re.Match[str]) -> str:
    return f"<|{marker.group()[1:]}"


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise TemplateError("the messages or tools are nested too deeply") from error
