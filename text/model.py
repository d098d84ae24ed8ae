"""The text side of a model: tokenizer, chat template, end tokens, limits; from a file or a scheme.

Reads only the metadata of a GGUF file, or the small files of a directory; the weights are the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text.bpe import bpe_tokenizer
from text.byte_tokenizer import (
    END_ID,
    SCRIPT_CONTEXT_LENGTH,
    TINY_CONTEXT_LENGTH,
    ByteChatTemplate,
    ByteTokenizer,
)
from text.chat_template import ChatTemplate, JinjaChatTemplate
from text.errors import GgufError, VocabularyError
from text.gguf import GgufFile
from text.hf import read_directory, read_json, template_sources
from text.infill import Infill, infill_of
from text.reasoning import reasoning_of
from text.sentencepiece import sentencepiece_tokenizer
from text.tokenizer import Tokenizer
from text.tool_parsers import GENERIC, format_of
from text.vocabulary import Vocabulary
from text.wordpiece import JsonTokenizer

_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything about a model that has to do with text."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: a base model, which has no form for conversations
    end_ids: frozenset[int]
    context_length: int  # tokens, prompt and answer together
    vocab_size: int
    dimensions: int | None = None  # of its vectors; None: the model generates, and makes no vectors
    infill: Infill | None = None  # None: the model cannot fill in the middle
    tool_format: str = GENERIC  # a name of `text.tool_parsers.FORMATS`
    reasoning: str | None = None  # a name of `text.reasoning.MARKS`; None: it does not think aloud


def load_text_model(source: str) -> TextModel:
    """`source` is the path of a GGUF file or of a Hugging Face directory, `tiny:…` or `script:…`.

    Raises `text.errors.TextError` (`GgufError`, `VocabularyError`, `TemplateError`) naming file and reason.
    """
    scheme, colon, options = source.partition(":")
    if colon and scheme == "script":
        # It may speak with another model's words; its other options are the engine's.
        for option in options.split(","):
            if option.startswith("text="):
                return load_text_model(option.removeprefix("text="))
    if colon and scheme in ("tiny", "script"):
        return TextModel(
            name=scheme,
            tokenizer=ByteTokenizer(),
            chat_template=ByteChatTemplate(),
            end_ids=frozenset({END_ID}),
            context_length=SCRIPT_CONTEXT_LENGTH if scheme == "script" else _tiny_context(options),
            vocab_size=ByteTokenizer.vocab_size,
        )
    if Path(source).is_dir():
        encodes = read_json(Path(source) / "config.json").get("model_type") == "bert"
        return _encoder(Path(source)) if encodes else _directory_model(Path(source))
    with GgufFile.open(source) as file:
        metadata = file.metadata
    try:
        vocabulary = Vocabulary.from_metadata(metadata)
        tokenizer = _tokenizer(vocabulary)
    except VocabularyError as error:
        raise VocabularyError(f"{source}: {error}") from error
    name = metadata.get("general.name")
    return TextModel(
        name=name if isinstance(name, str) and name else Path(source).stem,
        tokenizer=tokenizer,
        chat_template=_chat_template(
            vocabulary, _template_source(metadata), metadata.get(f"{_TEMPLATE_KEY}.tool_use")
        ),
        end_ids=vocabulary.end_ids,
        context_length=_context_length(source, metadata),
        vocab_size=len(vocabulary),
        infill=infill_of(vocabulary),
        tool_format=format_of(_template_source(metadata, tools=True)),
        reasoning=reasoning_of(_template_source(metadata)),
    )


def _encoder(directory: Path) -> TextModel:
    """The text side of an encoder in a directory: `config.json`, `tokenizer.json`, maybe its longest text."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        context, dimensions = int(config["max_position_embeddings"]), int(config["hidden_size"])
        longest = directory / "sentence_bert_config.json"
        if longest.exists():
            context = min(context, int(json.loads(longest.read_text(encoding="utf-8"))["max_seq_length"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VocabularyError(f"{directory}: {error!r}") from error
    tokenizer = JsonTokenizer(directory / "tokenizer.json")
    return TextModel(
        name=directory.name,
        tokenizer=tokenizer,
        chat_template=None,
        end_ids=frozenset(),
        context_length=context,
        vocab_size=tokenizer.vocab_size,
        dimensions=dimensions,
    )


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.model == "gpt2":
        return bpe_tokenizer(vocabulary)
    if vocabulary.model == "llama":
        return sentencepiece_tokenizer(vocabulary)
    raise VocabularyError(f"tokenizer.ggml.model is {vocabulary.model!r}; known are gpt2, llama")


def _directory_model(directory: Path) -> TextModel:
    tokenizer, vocabulary, config = read_directory(directory)
    source, tool_source = template_sources(directory)
    context = config.get("max_position_embeddings")
    if type(context) is not int or context < 1:
        raise VocabularyError(f"{directory / 'config.json'}: max_position_embeddings is {context!r}")
    return TextModel(
        name=directory.name,
        tokenizer=tokenizer,
        chat_template=_chat_template(vocabulary, source, tool_source),
        end_ids=vocabulary.end_ids,
        context_length=context,
        vocab_size=len(vocabulary),
        infill=infill_of(vocabulary),
        tool_format=format_of(tool_source or source),
        reasoning=reasoning_of(source),
    )


def _chat_template(vocabulary: Vocabulary, source: str | None, tool_source: object) -> ChatTemplate | None:
    if source is None:
        return None
    ids = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    return JinjaChatTemplate(
        source,
        special_tokens={name: vocabulary.tokens[i] for name, i in ids.items() if i is not None},
        tool_source=tool_source if isinstance(tool_source, str) else None,
    )


def _template_source(metadata: Mapping[str, Any], *, tools: bool = False) -> str | None:
    """The template's text; with `tools`, that of the template for tools if there is one."""
    source = metadata.get(f"{_TEMPLATE_KEY}.tool_use") if tools else None
    source = source or metadata.get(_TEMPLATE_KEY)
    return source if isinstance(source, str) and source.strip() else None


def _tiny_context(options: str) -> int:
    """`context` of `seed=1,context=512`; the other options are the engine's, and so is checking them."""
    for option in options.split(","):
        key, _, text = option.partition("=")
        if key.strip() == "context" and text.strip().isdecimal():
            return int(text)
    return TINY_CONTEXT_LENGTH


def _context_length(source: str, metadata: Mapping[str, Any]) -> int:
    architecture = metadata.get("general.architecture")
    key = f"{architecture}.context_length"
    value = metadata.get(key)
    if type(value) is not int or value < 1:
        raise GgufError(f"{source}: metadata key {key!r} is {value!r}, not a number of tokens")
    return value
