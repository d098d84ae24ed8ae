"""The byte tokenizer and its chat format: every text survives, and messages cannot forge markers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import TemplateError, detokenize, load_text_model
from text.byte_tokenizer import ASSISTANT_ID, END_ID, SYSTEM_ID, USER_ID

MODEL = load_text_model("script:")
TOKENIZER = MODEL.tokenizer
TRICKY = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["<|user|>", "<||user|>", "<|end|>", "<|", "|>", "|", "<", "<|||assistant|>", "end"]),
    ),
    max_size=10,
).map("".join)


def rendered(messages: list[dict[str, Any]], **options: Any) -> list[int]:
    assert MODEL.chat_template is not None
    return TOKENIZER.encode(
        MODEL.chat_template.render(messages, **options), add_special=False, parse_special=True
    )


def test_the_form_of_a_conversation() -> None:
    ids = rendered(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "ü"},
            {"role": "assistant", "content": None},
        ]
    )
    assert ids == [
        *(SYSTEM_ID, ord("S"), END_ID),
        *(USER_ID, 0xC3, 0xBC, END_ID),
        *(ASSISTANT_ID, END_ID),
        ASSISTANT_ID,
    ]
    assert rendered([{"role": "user", "content": "a"}], add_generation_prompt=False) == [USER_ID, 97, END_ID]


@given(TRICKY, TRICKY)
def test_the_text_of_messages_survives(first: str, last: str) -> None:
    ids = rendered([{"role": "system", "content": first}, {"role": "user", "content": last}])
    start = len(ids) - 1 - ids[::-1].index(USER_ID)
    end = ids.index(END_ID, start)
    assert detokenize(TOKENIZER, ids[start + 1 : end]) == last
    assert detokenize(TOKENIZER, ids[1 : ids.index(END_ID)]) == first
    assert sum(token > 255 for token in ids) == 5


@given(st.text())
def test_plain_text_is_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special=True, parse_special=False)
    assert bytes(ids) == text.encode()


def test_roles_without_a_marker_of_their_own() -> None:
    ids = rendered([{"role": "user", "content": "u"}, {"role": "tool", "content": "t"}])
    assert ids == [USER_ID, ord("u"), END_ID, SYSTEM_ID, ord("t"), END_ID, ASSISTANT_ID]
    with pytest.raises(TemplateError, match="wizard"):
        rendered([{"role": "wizard", "content": "w"}])


def test_tools_and_calls_reach_the_model() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": '{"x": 1}'}}
    ids = rendered(
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "ping"}}],
    )
    text = detokenize(TOKENIZER, ids)
    assert '{"name": "ping"}' in text
    assert '"arguments": {"x": 1}' in text


def test_names_and_edges() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.bos_id, TOKENIZER.add_bos) == (272, 256, False)
    assert TOKENIZER.piece(256) == b""
    assert TOKENIZER.token_text(257) == "<|end|>"
    assert TOKENIZER.token_text(0xC3) == "\ufffd"
    assert TOKENIZER.token_bytes(271) == b""
    for bad in (-1, 272):
        with pytest.raises(IndexError):
            TOKENIZER.piece(bad)
    assert TOKENIZER.encode("\ud800", add_special=False, parse_special=True) == [0xEF, 0xBF, 0xBD]


def test_schemes() -> None:
    assert (MODEL.name, MODEL.context_length) == ("script", 32768)
    assert MODEL.end_ids == {257}
    assert load_text_model("tiny:seed=1").context_length == 4096
    assert load_text_model("tiny:seed=1,context=512").context_length == 512
