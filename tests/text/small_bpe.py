"""A byte-level BPE model so small that its ids can be told by hand."""

from __future__ import annotations

from typing import Any

CONTROL, USER_DEFINED = 3, 4
MERGES = ["a b", "ab c", "1 2", "12 3", "Ġ a", "Ġ Ġ", "e Ì", "eÌ ģ", "Ã ©"]


def alphabet() -> list[str]:
    """The 256 characters of byte-level vocabularies, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def metadata(**changes: Any) -> dict[str, Any]:
    """A small model: bytes are ids 0 to 255, then the merged tokens, then a few added ones."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    added = ["<|bos|>", "<|end|>", "<|go|>", "\n\n"]
    out = {
        "general.architecture": "llama",
        "general.name": "Small",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet(), *merged, *added],
        "tokenizer.ggml.token_type": [1] * (256 + len(merged))
        + [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 256 + len(merged),
        "tokenizer.ggml.eos_token_id": 257 + len(merged),
    }
    for name, content in changes.items():
        key = f"tokenizer.ggml.{name}"
        if content is None:
            del out[key]
        else:
            out[key] = content
    return out


BOS, END, GO, BLANK_LINE = range(256 + len(MERGES), 260 + len(MERGES))
