"""What answers have to obey, from what a request asks for to one grammar, tried for the model that it is for.

Everything is made and compiled in one thread of its own, in which organisations take turns: what is slow
there holds up no stream, nobody's tokenising and no other organisation for longer than one grammar takes;
a request that is cancelled meanwhile is not compiled. It does not know how fields are spelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.errors import InvalidRequest
from router.core.texts import ServedModel
from router.core.turns import Turns
from text import AnswerForm
from text.grammar import Calls, GrammarError, Grammars
from text.grammar.forms import after_reasoning, mark_of, of_calls
from text.grammar.schema import closed, json_terminal
from text.tool_parsers.lark import Function, Mark

# At most a tenth of a second each: what waits longer than some seconds had better come again.
WAITING_MAX = 64
ORGANISATION_MAX = 16


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Makes the grammar of the answer's text; `param` is the field that asks for it."""

    param: str
    make: Callable[[], str]


@dataclass(frozen=True, slots=True)
class CallOutput:
    """Calls of these functions: nothing else (`forced`), or where the model wants to.

    A schema that is not `strict` and cannot be enforced is not: any object will do.
    """

    functions: Sequence[tuple[Function, bool]]
    forced: bool
    many: bool
    param: str = "tools"


class ModelGrammars:
    """One router's."""

    def __init__(self) -> None:
        self._turns = Turns(
            "grammar",
            waiting_max=WAITING_MAX,
            owner_max=ORGANISATION_MAX,
            refusal="Too many grammars are being compiled. Try again.",
        )
        self._grammars: dict[str, tuple[ServedModel, Grammars]] = {}

    async def make(
        self,
        organisation: str,
        model: ServedModel,
        form: AnswerForm | None,
        text: StructuredOutput | None,
        calls: CallOutput | None,
    ) -> str:
        """The grammar of an answer of this form, "" if it is free. Raises InvalidRequest."""
        if text is None and calls is None:
            return ""
        return await self._turns.run(organisation, self._make, model, form, text, calls)

    async def check(self, organisation: str, model: ServedModel, grammar: str, param: str) -> None:
        """Compiles it as a worker will; raises InvalidRequest for what cannot be enforced."""
        await self._turns.run(organisation, self._compile, model, grammar, param)

    def close(self) -> None:
        self._turns.close()

    def _make(
        self,
        model: ServedModel,
        form: AnswerForm | None,
        text: StructuredOutput | None,
        calls: CallOutput | None,
    ) -> str:
        param = text.param if text is not None else "tools"
        try:
            grammar = text.make() if text is not None else None
            if calls is not None and form is not None and form.tools is not None:
                param = calls.param
                wanted = Calls(form.tools, _functions(calls.functions), calls.forced, calls.many)
                grammar = of_calls(wanted, _mark(model), grammar)
            if grammar is None:
                return ""
            if form is not None and form.reasoning is not None:
                grammar = after_reasoning(grammar, form.reasoning, _mark(model), opened=form.thinking)
        except GrammarError as error:
            raise _refused(param, error) from error
        self._compile(model, grammar, param)
        return grammar

    def _compile(self, model: ServedModel, grammar: str, param: str) -> None:
        known = self._grammars.get(model.name)
        try:
            if known is None or known[0] is not model:
                text = model.text
                known = (model, Grammars(text.tokenizer, text.end_ids, text.vocab_size))
                self._grammars[model.name] = known
            known[1].compile(grammar)
        except GrammarError as error:
            raise _refused(param, error) from error


def _functions(functions: Sequence[tuple[Function, bool]]) -> list[Function]:
    made: list[Function] = []
    for function, strict in functions:
        try:
            schema = closed({"type": "object", **function.schema})
            json_terminal(schema)
            made.append(Function(function.name, schema))
        except GrammarError:
            if strict:
                raise
            made.append(Function(function.name, {"type": "object"}))
    return made


def _mark(model: ServedModel) -> Mark:
    tokenizer = model.text.tokenizer

    def token(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        return ids[0] if len(ids) == 1 and not tokenizer.piece(ids[0]) else None

    return mark_of(token)


def _refused(param: str, error: GrammarError) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{param}': {error}.", code="invalid_grammar", param=param)
