"""The tokenizer of the tiny and the scripted model as files: a token to a byte. Clients would fetch one otherwise."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def byte_tokenizer(directory: str) -> None:
    """Makes the directory."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    Path(directory).mkdir()
    made.save(f"{directory}/tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    Path(directory, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
