"""Filling in the middle: how code models are asked for the text between a prefix and a suffix.

The three marks are control tokens, found by their names because few files say which they are. All known
formats write prefix mark, prefix, suffix mark, suffix, middle mark; the model goes on with the middle. Does
not know what the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from text.vocabulary import TokenType, Vocabulary

# (prefix, suffix, middle) as families of models name them.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """The ids of the three marks."""

    prefix_id: int
    suffix_id: int
    middle_id: int

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Ids after which the model writes what stands between `prefix` and `suffix`."""
        return [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id]


def infill_of(vocabulary: Vocabulary) -> Infill | None:
    """The marks of a vocabulary; None for a model that cannot fill in."""
    known = vocabulary.texts(TokenType.CONTROL, TokenType.USER_DEFINED)
    for names in _NAMES:
        if all(name in known for name in names):
            return Infill(*(known[name] for name in names))
    return None
