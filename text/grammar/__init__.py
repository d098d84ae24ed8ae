"""Grammars that an answer has to obey: from a schema, a regex, a choice, Lark or GBNF, and for tool calls.

`forms` writes them, `Grammars` compiles them for a vocabulary, a `Matcher` follows one sequence.
"""

from text.grammar.compiler import Grammars
from text.grammar.errors import GrammarError
from text.grammar.forms import Calls
from text.grammar.matcher import Allowed, Matcher

__all__ = ["Allowed", "Calls", "GrammarError", "Grammars", "Matcher"]
