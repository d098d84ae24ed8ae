"""Answers taken apart: the same parts however the text is cut, and no character lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

import pytest

from text.answer_parser import AnswerForm, AnswerParser
from text.parts import End, Part, Reasoning, Text, ToolCallArguments, ToolCallStart
from text.tool_parsers import FORMATS, format_of

PLAN = '{"steps":[{"n":1,"t":"a}b"},{"n":2,"t":"\\"q\\""}],"opt":{}}'
FUNCTIONS = frozenset({"plan", "ping", "add", "weather"})


def taken_apart(form: AnswerForm, pieces: Iterable[str]) -> list[Part]:
    parser = AnswerParser(form)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return parts + parser.end()


def told(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, text, calls)."""
    calls: list[list[str]] = []
    ids: set[str] = set()
    for part in parts:
        if isinstance(part, ToolCallStart):
            assert part.index == len(calls)
            assert part.id not in ids
            ids.add(part.id)
            calls.append([part.name, ""])
        elif isinstance(part, ToolCallArguments):
            assert part.index == len(calls) - 1
            assert part.text
            calls[-1][1] += part.text
    assert [part for part in parts if isinstance(part, End)] == [parts[-1]] == [End(len(calls))]
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Text)),
        [(name, arguments) for name, arguments in calls],
    )


def cut(draw: random.Random, text: str) -> list[str]:
    """Random pieces; also the whole, and single characters."""
    size = draw.choice([1, 2, 3, 5, 17, len(text) or 1])
    pieces, at = [], 0
    while at < len(text):
        end = at + draw.randint(1, size)
        pieces.append(text[at:end])
        at = end
    return pieces


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Hello <b>you</b> < tool", "Hello <b>you</b> < tool", []),
    ("hermes", f'<tool_call>\n{{"name": "plan", "arguments": {PLAN}}}\n</tool_call>', "", [("plan", PLAN)]),
    ("hermes", f'<tool_call>{{"arguments":{PLAN},"name":"plan"}}</tool_call>', "", [("plan", PLAN)]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "ping"}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 2}"}\n</tool_call>',
        "Let me see.",
        [("ping", "{}"), ("add", '{"a": 2}')],
    ),
    ("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", [("ping", "{}")]),
    ("hermes", "a <tool_call>nonsense</tool_call> b", "a <tool_call>nonsense</tool_call> b", []),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": [1, "x', "", [("add", '{"a": [1, "x')]),
    ("hermes", '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    ("llama3", f'{{"name": "plan", "parameters": {PLAN}}}', "", [("plan", PLAN)]),
    ("llama3", '<|python_tag|>{"name": "ping", "parameters": {}}', "", [("ping", "{}")]),
    (
        "llama3",
        '{"name": "ping", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}',
        "",
        [("ping", "{}"), ("add", '{"a": 1}')],
    ),
    ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3", ' {"a": 1} is JSON', ' {"a": 1} is JSON', []),
    ("llama3", "Plain.\n", "Plain.\n", []),
    ("json", f'{{"name": "plan", "arguments": {PLAN}}}', "", [("plan", PLAN)]),
    (
        "json",
        '```json\n[{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {}}]\n```',
        "",
        [("ping", "{}"), ("ping", "{}")],
    ),
    ("json", '[1, 2, {"name": "x"}]', '[1, 2, {"name": "x"}]', []),
    ("json", "```python\nprint()\n```", "```python\nprint()\n```", []),
    ("json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("json", '{"name": "ping"} and more', " and more", [("ping", "{}")]),
    ("mistral", f'[TOOL_CALLS][{{"name": "plan", "arguments": {PLAN}}}]', "", [("plan", PLAN)]),
    (
        "mistral",
        'Well. [TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]',
        "Well.",
        [("ping", "{}"), ("add", '{"a": 1}')],
    ),
    (
        "mistral",
        '[TOOL_CALLS]ping[ARGS]{}[TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": 1}',
        "",
        [("ping", "{}"), ("add", '{"a": 1}')],
    ),
    ("mistral", "[TOOL] [1, 2]", "[TOOL] [1, 2]", []),
    (
        "deepseek",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>plan\n```json\n"
        f"{PLAN}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        [("plan", PLAN), ("ping", "{}")],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>plan<｜tool▁sep｜>{PLAN}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("plan", PLAN)],
    ),
    (
        "pythonic",
        "[plan(a='x, \"y\"', b=[1, (2, None)], c={'k': True}, d=-1.5), ping()]",
        "",
        [("plan", '{"a": "x, \\"y\\"", "b": [1, [2, null]], "c": {"k": true}, "d": -1.5}'), ("ping", "{}")],
    ),
    ("pythonic", "[1, 2] and [plan", "[1, 2] and [plan", []),
    ("pythonic", "[add(1, 2)]", "[add(1, 2)]", []),
    ("pythonic", "[add(a=1, b=tr", "", [("add", '{"a": 1, "b": "tr"')]),
    (
        "gemma",
        'Sure:\n```tool_code\nadd(a=1, b="z")\nping()\n```',
        "Sure:",
        [("add", '{"a": 1, "b": "z"}'), ("ping", "{}")],
    ),
    ("gemma", "```tool_code\n[ping()]\n```", "", [("ping", "{}")]),
    ("gemma", "```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```", []),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_parts_do_not_depend_on_the_cut(
    form: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:  # B37, B38, B39
    draw = random.Random(answer)
    wanted = AnswerForm(tools=form, functions=FUNCTIONS)
    for _ in range(40):
        assert told(taken_apart(wanted, cut(draw, answer))) == ("", text, calls)


@pytest.mark.parametrize("form", FORMATS)
def test_text_without_calls_is_left_exactly_as_it_is(form: str) -> None:
    draw = random.Random(form)
    marks = "".join(FORMATS[form].MARKS)
    for _ in range(150):
        text = "".join(draw.choices('ab {}[]"`\n:,<>|' + marks, k=draw.randint(0, 40)))
        reasoning, shown, calls = told(
            taken_apart(AnswerForm(tools=form, functions=FUNCTIONS), cut(draw, text))
        )
        assert not reasoning
        if not calls:
            assert shown == text


@pytest.mark.parametrize("form", FORMATS)
def test_garbage_gives_the_same_parts_for_any_cut(form: str) -> None:
    draw = random.Random(form + "garbage")
    words = [
        *FORMATS[form].MARKS,
        *FUNCTIONS,
        '{"name": "',
        '", "arguments": ',
        "{}",
        "(",
        ")",
        "=",
        "[",
        "]",
    ]
    words += ['"', ",", " ", "\n", "}", "1", "null", "```", "\\", "parameters", "<think>", "</think>"]
    wanted = AnswerForm(tools=form, functions=FUNCTIONS, reasoning="think")
    for _ in range(150):
        text = "".join(draw.choices(words, k=draw.randint(1, 25)))
        whole = told(taken_apart(wanted, [text]))
        for _ in range(4):
            assert told(taken_apart(wanted, cut(draw, text))) == whole


def test_reasoning_is_split_off_the_beginning() -> None:
    draw = random.Random(7)
    plain = AnswerForm(reasoning="think")
    opened = AnswerForm(reasoning="think", thinking=True)
    call = AnswerForm(tools="hermes", functions=FUNCTIONS, reasoning="think")
    cases: list[tuple[AnswerForm, str, str, str, list[tuple[str, str]]]] = [
        (plain, "<think>\nso it is\n</think>\n\nFour.", "so it is", "Four.", []),
        (plain, "Four <think>x</think>", "", "Four <think>x</think>", []),
        (plain, "  <thin", "", "  <thin", []),
        (plain, "<think>cut o", "cut o", "", []),
        (opened, "hm\n</think>\nYes.\n", "hm", "Yes.\n", []),
        (opened, "never ends", "never ends", "", []),
        (
            call,
            '<think>ping!</think>\n<tool_call>\n{"name": "ping"}\n</tool_call>',
            "ping!",
            "",
            [("ping", "{}")],
        ),
    ]
    for form, answer, reasoning, text, calls in cases:
        for _ in range(20):
            assert told(taken_apart(form, cut(draw, answer))) == (reasoning, text, calls), answer


def test_the_parser_knows_while_it_comes_whether_the_model_thinks() -> None:
    parser = AnswerParser(AnswerForm(reasoning="think"))
    seen = []
    for piece in ("<think>", "a", "</think>", "b"):
        parser.push(piece)
        seen.append(parser.thinking)
    assert seen == [True, True, False, False]


def test_ids_have_the_form_that_templates_want() -> None:
    answer = '{"name": "ping"}'
    [start, *_] = taken_apart(AnswerForm(tools="json", functions=FUNCTIONS), [answer])
    assert isinstance(start, ToolCallStart)
    assert start.id.startswith("call_")
    [start, *_] = taken_apart(AnswerForm(tools="mistral"), [f"[TOOL_CALLS][{answer}]"])
    assert isinstance(start, ToolCallStart)
    assert len(start.id) == 9
    assert start.id.isalnum()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("… <tool_call> …", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        ("<start_of_turn>model\n", "gemma"),
        ("<|im_start|>", "json"),
        (None, "json"),
    ],
)
def test_the_template_tells_the_format(template: str | None, form: str) -> None:
    assert format_of(template) == form


def test_arguments_stream_while_they_are_written() -> None:
    parser = AnswerParser(AnswerForm(tools="hermes", functions=FUNCTIONS))
    parser.push('<tool_call>{"name": "add", "arguments": {"a": "')
    assert parser.push("long ") == [ToolCallArguments(0, "long ")]
    assert json.loads('{"a": "long "}') == {"a": "long "}
