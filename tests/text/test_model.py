"""A model's text side as a whole: template and tokenizer together, from one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.text import gguf_builder as build
from tests.text.small_bpe import BOS, metadata
from text import TemplateError, TextModel, load_text_model

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
STRICT = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def load(tmp_path: Path, template: str, **changes: Any) -> TextModel:
    path = tmp_path / "small.gguf"
    path.write_bytes(build.metadata_file({**metadata(**changes), "tokenizer.chat_template": template}))
    return load_text_model(str(path))


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS], ids=["template-bos", "template-plain"])
def test_every_way_in_gives_at_most_one_begin_token(
    tmp_path: Path, template: str, add_bos: bool | None
) -> None:  # B35
    changes = {} if add_bos is None else {"add_bos_token": add_bos}
    model = load(tmp_path, template, **changes)
    assert model.chat_template is not None
    rendered = model.chat_template.render(
        [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "ab"}]
    )
    # A conversation is what its template wrote and nothing more.
    chat = model.tokenizer.encode(rendered, add_special=False, parse_special=True)
    assert chat.count(BOS) == (1 if template is WITH_BOS else 0)
    # The same text as a raw prompt gets a begin token if the tokenizer says so and it has none.
    raw = model.tokenizer.encode(rendered, add_special=True, parse_special=True)
    assert raw.count(BOS) == (1 if template is WITH_BOS or add_bos else 0)
    assert raw[-len(chat) :] == chat


ORDERS: list[tuple[list[str], str | None]] = [
    (["user"], None),
    (["user", "assistant"], None),
    (["user", "assistant", "user"], None),
    (["system", "user"], "Only user and assistant roles"),
    (["system", "system", "user"], "Only user and assistant roles"),
    (["developer", "user"], "Only user and assistant roles"),
    (["wizard"], "Only user and assistant roles"),
    (["user", "user"], "Roles must alternate user/assistant"),
    (["assistant"], "Roles must alternate user/assistant"),
]


@pytest.mark.parametrize(("roles", "reason"), ORDERS, ids=lambda value: str(value)[:40])
def test_a_template_decides_about_roles_and_says_why(
    tmp_path: Path, roles: list[str], reason: str | None
) -> None:  # B31
    template = load(tmp_path, STRICT).chat_template
    assert template is not None
    messages = [{"role": role, "content": "x"} for role in roles]
    if reason is None:
        assert template.render(messages) == "".join(f"[{role}]x" for role in roles)
        return
    with pytest.raises(TemplateError, match=f"^{reason}$"):
        template.render(messages)
