"""The text side of a Hugging Face directory: the published pipeline, all end tokens, the template."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from text import load_text_model
from text.errors import VocabularyError
from text.model import TextModel

WORDS = ["<s>", "<e1>", "<e2>", "<|im_end|>", "<tool>"]


def write(directory: Path, *, size: int = 300, **files: dict[str, Any]) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.add_tokens(WORDS[4:])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    parts = {
        "config": {"vocab_size": size, "max_position_embeddings": 64, "eos_token_id": None},
        "tokenizer_config": {
            "eos_token": {"content": "<e1>"},
            "bos_token": "<s>",
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}<e2>{% endfor %}",
        },
        "generation_config": {"eos_token_id": [257, 258]},
        **files,
    }
    for name, content in parts.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> TextModel:
    return load_text_model(str(write(tmp_path / "m")))


def test_ids_and_bytes(model: TextModel) -> None:
    t = model.tokenizer
    assert t.vocab_size == model.vocab_size == 300
    assert t.encode("<e1>", add_special=False, parse_special=True) == [257]
    assert len(t.encode("<e1>", add_special=False, parse_special=False)) == 4
    assert t.encode("<tool>", add_special=False, parse_special=False) == [260]
    text = "héllo <e1> 🙂\x00"
    for parse in (False, True):
        ids = t.encode(text, add_special=True, parse_special=parse)
        assert ids[0] == t.bos_id == 256
        assert b"".join(map(t.token_bytes, ids[1:])) == text.encode()
        assert t.encode("<s>" + text, add_special=True, parse_special=True)[:2] != [256, 256]
    assert t.piece(257) == b""
    assert t.token_bytes(257) == b"<e1>"
    assert t.piece(299) == b""
    with pytest.raises(IndexError):
        t.piece(300)


def test_every_file_may_name_end_tokens(model: TextModel, tmp_path: Path) -> None:
    assert model.end_ids == {257, 258, 259}
    config = {"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 256}
    other = load_text_model(str(write(tmp_path / "o", config=config, generation_config={})))
    assert other.end_ids == {256, 257, 259}


def test_the_template(model: TextModel, tmp_path: Path) -> None:
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hi"}]) == "<s>hi<e2>"
    directory = write(tmp_path / "j")
    (directory / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    other = load_text_model(str(directory)).chat_template
    assert other is not None
    assert other.render([{"role": "user", "content": "hi"}]) == "[hi]"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config": {"vocab_size": 100, "max_position_embeddings": 64}}, "vocab_size"),
        ({"config": {"vocab_size": 300}}, "max_position_embeddings"),
        ({"generation_config": {"eos_token_id": [900]}}, "900"),
    ],
)
def test_files_that_disagree(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(VocabularyError, match=said):
        load_text_model(str(write(tmp_path / "m", **files)))


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    directory = write(tmp_path / "m")
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        load_text_model(str(directory))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(VocabularyError, match=r"tokenizer\.json is missing"):
        load_text_model(str(directory))
