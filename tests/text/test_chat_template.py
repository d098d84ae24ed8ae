"""Chat templates: the environment they expect, what they may not do, and how they refuse."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from text import TemplateError
from text.chat_template import MAX_OUTPUT_CHARS, JinjaChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return JinjaChatTemplate(source).render(USER if messages is None else messages, **options)


def test_the_environment() -> None:
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}")
        == "hi\n"
    )
    assert render("{% for m in [1,2,3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}") == "13"
    assert render("{{ [{'b': '<é>', 'a': 1.0}] | tojson }}") == '[{"b": "<é>", "a": 1.0}]'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'
    assert render("{% generation %}\n{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{{ bos_token }}|{{ tools is none }}|{{ add_generation_prompt }}") == "|True|True"
    assert render("{{ '<b>' }}{{ messages[0]['content'] | trim }}") == "<b>hi"


def test_special_tokens_and_variables() -> None:
    template = JinjaChatTemplate(
        "{{ bos_token }}{{ enable_thinking }}{{ messages|length }}", special_tokens={"bos_token": "<s>"}
    )
    assert template.render(USER, variables={"enable_thinking": False, "messages": []}) == "<s>False1"
    assert template.render(USER, variables={"bos_token": "forged"}).startswith("<s>")


def test_the_date_comes_from_the_clock() -> None:
    template = JinjaChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 3, 4))
    assert template.render(USER) == "04 Mar 2026"


def test_another_template_for_tools() -> None:
    template = JinjaChatTemplate("plain", tool_source="tools: {{ tools | tojson }}")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[{"type": "function"}]) == 'tools: [{"type": "function"}]'


def test_refusals_carry_the_message_of_the_template() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role, please') }}{% endif %}ok"
    )
    with pytest.raises(TemplateError, match=r"^No system role, please$"):
        render(source, [{"role": "system", "content": "x"}])
    assert render(source) == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ 10 ** 1000000000 }}",
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'other' %}",
    ],
)
def test_whatever_goes_wrong_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(TemplateError, match=f"{MAX_OUTPUT_CHARS}"):
        render(source, [{"role": "user", "content": "x" * (MAX_OUTPUT_CHARS // 500)}])


@pytest.mark.parametrize("source", ["{% if %}", "{{ ", "{% for x in y %}", "{{ x | no_such_filter }}"])
def test_broken_templates_are_found_at_load(source: str) -> None:
    with pytest.raises(TemplateError, match="broken"):
        JinjaChatTemplate("line one\n" + source)


def test_messages_are_made_as_templates_expect_them() -> None:
    source = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}, "x": None}
    given: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": None,
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
    ]
    assert render(source, given).splitlines() == [
        '{"role": "user", "content": "a\\nb"}',
        '{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", '
        '"function": {"name": "f", "arguments": {"a": "ü"}}}]}',
        '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], "content": ""}',
    ]
    assert call["function"] == {"name": "f", "arguments": '{"a": "ü"}'}  # the request itself is left alone


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"messages\[0\]\.content\[0\].*image_url",
        ),
        ({"content": [{"type": "text"}]}, "text"),
        ({"content": 5}, "neither text"),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "no JSON"),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "no JSON object"),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100000}}]}, "no JSON"),
    ],
)
def test_messages_that_cannot_be_used(message: dict[str, Any], text: str) -> None:
    with pytest.raises(TemplateError, match=text):
        render("x", [{"role": "user", **message}])


def test_deep_tools_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(TemplateError, match="nested too deeply"):
        render("{{ tools | tojson }}", tools=[deep])
