"""The one error of grammars."""

from __future__ import annotations

from text.errors import TextError


class GrammarError(TextError):
    """The grammar or schema is broken, too large, or cannot be enforced; the message says what and where."""
