"""How much a model is to think: `reasoning_effort` and `chat_template_kwargs`, in the words of its template.

| field | here |
|---|---|
| reasoning_effort | given to a template that knows it; a switch for thinking is off at `none`, else on |
| chat_template_kwargs | further names for the template; one that it does not use is refused |

A model without such a switch takes `none` if it does not think, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.errors import InvalidRequest
from router.openai.fields import Fields
from text import TextModel

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")
KWARGS_MAX = 32
# What the router itself gives to templates.
_TAKEN = frozenset({"messages", "tools", "add_generation_prompt", "documents"})


def effort_of(fields: Fields) -> str | None:
    """The field `reasoning_effort`; raises InvalidRequest."""
    effort = fields.string("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(
            f"Invalid value: 'reasoning_effort'. Supported values are: {', '.join(EFFORTS)}.",
            code="invalid_value",
            param="reasoning_effort",
        )
    return effort


def template_variables_of(fields: Fields) -> Mapping[str, Any]:
    """The field `chat_template_kwargs`; raises InvalidRequest. The template is asked later."""
    given = fields.object("chat_template_kwargs") or {}
    taken = sorted(_TAKEN & set(given))
    if taken or len(given) > KWARGS_MAX:
        shown = f"'{taken[0]}' is not for it to set" if taken else f"at most {KWARGS_MAX} names are accepted"
        raise InvalidRequest(
            f"Invalid 'chat_template_kwargs': {shown}.", code="invalid_value", param="chat_template_kwargs"
        )
    return given


def variables(text: TextModel, effort: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What this model's template is given; raises InvalidRequest for an effort that it cannot follow."""
    if effort is None:
        return given
    known = text.chat_template.names if text.chat_template is not None else frozenset()
    found: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in known}
    if "reasoning_effort" in known:
        found["reasoning_effort"] = effort
    if not found and not (effort == "none" and text.reasoning is None):
        raise InvalidRequest(
            f"Unsupported value: 'reasoning_effort' does not support '{effort}' with this model.",
            code="unsupported_value",
            param="reasoning_effort",
        )
    return {**found, **given}
