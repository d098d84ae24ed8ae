"""One choice of a request: its tokens so far, and the text that may be shown of them.

Survives placements: a worker that takes over continues the same choice, and
detokenising and stop strings go on where they were. It does not know where
tokens come from nor who reads the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.request import Delta, Scored, Token, TopToken
from text import AnswerForm, AnswerParser, Detokenizer, StopStrings, Tokenizer
from text.parts import joined

LOGPROB_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one choice, as a worker made them.

    `logprobs` is empty or has one (logprob, [(id, logprob), ...]) per token;
    `finish` is "stop" or "length" on the last row; `stop_token` is the id that ended it.
    """

    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[Scored, ...] = ()
    finish: str | None = None
    stop_token: int | None = None
    prompt_logprobs: tuple[Scored, ...] | None = None


class Choice:
    """`tokens` counts everything generated, over all placements; `finish` is set once."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        end_ids: frozenset[int],
        form: AnswerForm | None = None,
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._tokenizer = tokenizer
        self._parser = AnswerParser(form) if form is not None else None
        self._detokenizer = Detokenizer(Visible(tokenizer, form.marks) if form is not None else tokenizer)
        self._stops = StopStrings(stops) if stops else None
        self._end_ids = end_ids
        self._decoded = 0

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def push(self, row: Row) -> Delta | None:
        """What the row adds; None if the choice is over already (tokens under way when it ended)."""
        if self.ended:
            return None
        delta = Delta(self.index, prompt=row.prompt_logprobs)
        self._push(row, delta)
        if self._parser is not None:
            if delta.finish is not None:
                joined(delta.parts, self._parser.end())
            delta.calls = self._parser.calls
        return delta

    def _push(self, row: Row, delta: Delta) -> None:
        for place, token in enumerate(row.tokens):
            ends = row.finish == "stop" and place == len(row.tokens) - 1
            self.tokens.append(token)
            delta.tokens.append(self._token(token, row, place))
            thinking = self._parser is not None and self._parser.thinking
            # The token that ends a choice is counted and not shown.
            hidden = ends and (row.stop_token is not None or token in self._end_ids)
            stopped = not hidden and self._shown(self._detokenizer.push([token]), delta)
            if thinking or (self._parser is not None and self._parser.thinking):
                delta.reasoning_tokens += 1
            if stopped:
                return
        if row.finish is not None:
            self._end(row.finish, delta)

    def _end(self, finish: str, delta: Delta) -> None:
        rest = self._detokenizer.flush()
        if rest and self._shown(rest, delta):
            return
        if self._stops is not None:
            self._show(self._stops.flush(), delta)
        self.finish = delta.finish = finish

    def _shown(self, text: str, delta: Delta) -> bool:
        """Adds what may be shown of `text`. True when a stop string has ended the choice."""
        self._decoded += len(text)
        if self._stops is None:
            self._show(text, delta)
            return False
        if not text:
            return False
        safe, matched = self._stops.push(text)
        self._show(safe, delta)
        if matched is None:
            return False
        self.finish = delta.finish = "stop"
        delta.stop = matched
        return True

    def _show(self, text: str, delta: Delta) -> None:
        delta.text += text
        if self._parser is not None and text:
            joined(delta.parts, self._parser.push(text))

    def _token(self, token: int, row: Row, place: int) -> Token:
        if not row.logprobs:
            return Token(token)
        return scored_token(self._tokenizer, token, row.logprobs[place], self._decoded)


def scored_token(tokenizer: Tokenizer, token: int, scored: Scored, text_offset: int) -> Token:
    """A token with its log-probability and the names of its alternatives."""
    logprob, top = scored
    return Token(
        token,
        tokenizer.token_text(token),
        tokenizer.piece(token),
        _finite(logprob),
        tuple(
            TopToken(other, tokenizer.token_text(other), tokenizer.piece(other), _finite(value))
            for other, value in top
        ),
        text_offset,
    )


class Visible:
    """Bytes of tokens, with the control tokens that a parser has to see given by their name."""

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._marks = {mark.encode() for mark in marks}

    def piece(self, token_id: int, /) -> bytes:
        piece = self._tokenizer.piece(token_id)
        if piece:
            return piece
        name = self._tokenizer.token_bytes(token_id)
        return name if name in self._marks else b""


def _finite(logprob: float) -> float:
    """JSON has no infinity; an impossible token gets a very small number. Never above 0."""
    if logprob != logprob or logprob < LOGPROB_LEAST:
        return LOGPROB_LEAST
    return min(logprob, 0.0)
