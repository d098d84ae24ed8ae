"""Renders a conversation into the prompt text that a model was trained on, by the Jinja template of its file.

Templates come with model files, so they run in a sandbox that can neither reach Python objects nor change
what it is given, and their output is bounded. The environment is the one templates are written against:
`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps key
order and escapes nothing for HTML, and `{% generation %}` blocks. Does not know tokens, and does not judge
roles: a template that refuses a conversation says so itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from text.errors import TemplateError
from text.messages import normalise

MAX_OUTPUT_CHARS = 32 << 20
_MAX_REPEAT = 1 << 20


class ChatTemplate(Protocol):
    """Conversation to prompt text."""

    @property
    def names(self) -> frozenset[str]:
        """The names that the template looks at, such as `tools` or `enable_thinking`."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. To be tokenised with `add_special=False, parse_special=True`: it holds its own begin
        token.

        `variables` are further names for the template, such as `enable_thinking`. Raises `TemplateError` with
        the template's own message where it refuses the messages.
        """
        ...


class JinjaChatTemplate:
    """A compiled template, and the names it may use for the special tokens of its model."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: `bos_token` and the like. `tool_source`: another template for requests with
        tools.

        Raises `TemplateError` where a template does not compile.
        """
        self._special_tokens = dict(special_tokens or {})
        environment = _environment(now)
        self._plain = _compiled(environment, source)
        self._with_tools = self._plain if tool_source is None else _compiled(environment, tool_source)
        self.names = frozenset(_names(environment, source))
        if tool_source is not None:
            self.names |= _names(environment, tool_source) | {"tools"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """See `ChatTemplate.render`."""
        names = {
            "documents": None,
            **(variables or {}),
            **self._special_tokens,
            "messages": normalise(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._with_tools if tools else self._plain
        try:
            return _bounded(template.generate(names))
        except TemplateError:
            raise
        except RecursionError as error:
            raise TemplateError(
                "the messages or tools are nested too deeply for the chat template"
            ) from error
        except (
            Exception
        ) as error:  # the template is foreign code: whatever it raises, it refused the messages
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Repetition is bounded as well: `"x" * 10**10` would be built before anyone could look at it."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"*", "**"})  # type: ignore[misc]

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > 64:
            raise TemplateError("the chat template uses too large a power")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and len(value) * int(times) > _MAX_REPEAT:
                    raise TemplateError("the chat template repeats a text too often")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the model itself wrote, for training. Rendering ignores the mark."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compiled(environment: _Sandbox, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is broken in line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError) as error:
        raise TemplateError(f"the chat template cannot be compiled: {error}") from error


def _names(environment: _Sandbox, source: str) -> set[str]:
    return jinja2.meta.find_undeclared_variables(environment.parse(source))


def _bounded(parts: Iterable[str]) -> str:
    size = 0
    out: list[str] = []
    for part in parts:
        size += len(part)
        if size > MAX_OUTPUT_CHARS:
            raise TemplateError(f"the chat template's output is larger than {MAX_OUTPUT_CHARS} characters")
        out.append(part)
    return "".join(out)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(str(message))
