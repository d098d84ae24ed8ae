"""`echo`: a completion's prompt, said again before its answer, with its log-probabilities if asked.

The prompt of a text is that text; the prompt of token ids is what their tokens are called,
control tokens included. It does not know how prompts are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from router.core.choice import scored_token
from router.core.request import Scored, Token
from text import Tokenizer


class Echo:
    """One prompt: `text` as it is shown, `ids` as it was computed."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | list[int], ids: list[int]) -> None:
        self.ids = ids
        self._tokenizer = tokenizer
        names = [tokenizer.token_bytes(token) for token in ids]
        if isinstance(prompt, str):
            self.text = prompt
        else:
            self.text = b"".join(names).decode(errors="replace")
        self._names = names

    def tokens(self, scored: Sequence[Scored]) -> list[Token]:
        """The prompt's tokens; nothing comes before the first, so it has no log-probability."""
        offsets = _offsets(self.text, self._names)
        first = Token(self.ids[0], self._tokenizer.token_text(self.ids[0]), text_offset=offsets[0])
        return [first] + [
            scored_token(self._tokenizer, token, position, offset)
            for token, position, offset in zip(self.ids[1:], scored, offsets[1:], strict=True)
        ]


def _offsets(text: str, names: Sequence[bytes]) -> list[int]:
    """Where in `text` each token begins, in characters.

    What is not in the text (a begin token, a blank that the tokenizer adds) takes no room.
    """
    raw = text.encode(errors="replace")
    # The character that each byte belongs to, and one more for the end.
    character = list(accumulate([*((byte & 0xC0) != 0x80 for byte in raw), True], initial=-1))[1:]
    at = 0
    offsets: list[int] = []
    for name in names:
        offsets.append(character[at])
        if raw.startswith(name, at):
            at += len(name)
        elif raw.startswith(name.lstrip(b" "), at):
            at += len(name.lstrip(b" "))
    return offsets
