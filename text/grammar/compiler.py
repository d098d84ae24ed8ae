"""Compiles grammars for one model's vocabulary, with `llguidance`.

Compiling blocks (a millisecond for most, never much more than `schema.py` and the limits here allow) and
releases the interpreter lock, so it belongs into a thread. What was compiled is kept for a while. Knows
nothing of requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from text.grammar.errors import GrammarError
from text.grammar.matcher import Matcher
from text.tokenizer import Tokenizer

KEPT_GRAMMARS = 128
KEPT_CHARS = 2 << 20
# Tokens by which a new grammar is tried.
TRIED_STEPS = 4


class Grammars:
    """`vocab_size` is the model's, which may have padding after the tokenizer's. Safe for several threads."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int], vocab_size: int) -> None:
        """Blocks: up to half a second for 150,000 tokens. Raises `GrammarError` without an end token."""
        end_ids = sorted(end_ids)
        if not end_ids:
            raise GrammarError("the model has no token to end an answer with")
        self._tokenizer = _tokenizer(tokenizer, end_ids, vocab_size)
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> Matcher:
        """A new matcher at the beginning of `grammar`; raises `GrammarError`."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return Matcher(known.deep_copy(), self._vocab_size)
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if compiled.is_error():
            raise GrammarError(_reason(compiled.get_error()))
        self._try(Matcher(compiled.deep_copy(), self._vocab_size))
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > KEPT_GRAMMARS or sum(map(len, self._kept)) > KEPT_CHARS:
                self._kept.popitem(last=False)
        return Matcher(compiled.deep_copy(), self._vocab_size)

    def _try(self, matcher: Matcher) -> None:
        """Some grammars turn out to be impossible, or too costly, only when they are followed."""
        for _ in range(TRIED_STEPS):
            [allowed] = matcher.allowed()
            if matcher.error is None and not allowed.any():
                raise GrammarError("nothing satisfies the grammar")
            allowed[self._end_ids] = False
            if matcher.error is None and allowed.any():
                matcher.take([int(allowed.argmax())])
            if matcher.error is not None:
                raise GrammarError("the grammar is too complex")
            if matcher.complete or not allowed.any():
                return


class _Vocabulary:
    """A tokenizer in the form that `llguidance` reads."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int], vocab_size: int) -> None:
        known = tokenizer.vocab_size
        pieces = [tokenizer.piece(token) for token in range(known)] + [b""] * (vocab_size - known)
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        # A control token has no text that plain text could be taken for.
        self.tokens = [piece or b"\xff<[%d]>" % token for token, piece in enumerate(pieces)]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._encode(text, add_special=False, parse_special=False)


def _tokenizer(tokenizer: Tokenizer, end_ids: list[int], vocab_size: int) -> LLTokenizer:
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, end_ids, vocab_size))
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=end_ids)


def _limits() -> LLParserLimits:
    """About a tenth of a second for compiling, some milliseconds for a step."""
    return LLParserLimits(
        initial_lexer_fuel=600_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _reason(error: str) -> str:
    """The compiler's first line, without where it stands in a text that the client never saw."""
    line = error.strip().split("\n")[0]
    for lead in ("failed to compile JSON schema: ", "): "):
        line = line.split(lead, 1)[-1]
    return line[:300] or "it cannot be compiled"
