"""The scripted model says what it is told, to the byte, and notices pages that are not what they were."""

import time
from pathlib import Path

import pytest

import engine
from engine import EngineError, Executor, Slice, SliceMeta
from engine.generate import Generation, generate_batch
from engine.sampling import SamplingParams
from engine.scripted import script_of
from tests.engine.pools import bind, failure, rows
from tests.text.gguf_builder import metadata_file
from tests.text.small_bpe import metadata
from text import load_text_model

END, SYSTEM, USER, ASSISTANT = 257, 258, 259, 260
TEXT = "héllo wörld 🙂 {}".encode()
CHAT = [SYSTEM, *b"be brief", END, USER, *b"first", END, ASSISTANT, *b"ok", END, USER, *TEXT, END, ASSISTANT]


@pytest.fixture
def script() -> Executor:
    return engine.load("script:")


def say(executor: Executor, prompt: list[int], *, tokens: int = 400, **metadata: str) -> Generation:
    generation = Generation(
        prompt, SamplingParams(temperature=0), tokens, frozenset({END}), metadata=metadata
    )
    generate_batch(executor, [generation], chunk_tokens=7)
    return generation


def test_it_says_the_last_user_message(script: Executor) -> None:
    generation = say(script, CHAT)
    assert generation.tokens == [*TEXT, END]
    assert generation.finish_reason == "stop"


def test_without_markers_it_says_the_whole_prompt(script: Executor) -> None:
    assert say(script, list(b"plain text")).tokens == [*b"plain text", END]
    assert script_of([USER, *b"open"]) == [*b"open", END]


def test_max_tokens_cuts_it(script: Executor) -> None:
    generation = say(script, CHAT, tokens=3, script_split="2")
    assert generation.tokens == list(TEXT[:3])
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("split", ["1", "1,3,2", "5", "100"])
def test_several_tokens_per_step_are_the_same_tokens(script: Executor, split: str) -> None:
    assert say(script, CHAT, script_split=split).tokens == [*TEXT, END]


def test_draft_follows_the_split(script: Executor) -> None:
    metadata = {"script_split": "1,3,2"}
    lengths = []
    generated = 0
    while generated < 12:
        draft = script.draft(SliceMeta(CHAT, metadata, generated))
        assert draft == list(TEXT[generated : generated + len(draft)])
        lengths.append(1 + len(draft))
        generated += lengths[-1]
    assert lengths == [1, 3, 2, 1, 3, 2]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=2.0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.1, repetition_penalty=2.0, presence_penalty=2.0),
        SamplingParams(temperature=0, frequency_penalty=2.0, logit_bias={101: 100.0, 108: -100.0}),
    ],
)
def test_sampling_parameters_cannot_change_the_text(script: Executor, params: SamplingParams) -> None:
    generation = Generation(CHAT, params, 100, frozenset({END}))
    assert generate_batch(script, [generation]) == [[*TEXT, END]]


def test_log_probabilities_are_near_zero(script: Executor) -> None:
    generation = Generation(CHAT, SamplingParams(temperature=0, logprobs=2), 5, frozenset({END}))
    generate_batch(script, [generation])
    assert all(s.logprob is not None and -1e-6 < s.logprob <= 0 for s in generation.sampled)
    assert all(s.top[0][0] == s.token for s in generation.sampled)


def test_a_continuation_goes_on_where_the_first_worker_stopped(script: Executor) -> None:
    """The prompt of a continuation holds what was generated; its script is that of the original prompt."""
    bind(script, 8)
    known = [*CHAT, *TEXT[:4]]
    meta = SliceMeta(CHAT, {}, generated=4)
    logits = rows(script.step([Slice(known, 0, range(8), 1, meta)])[0])
    assert int(logits[0].argmax()) == TEXT[4]


def test_a_step_fails_where_it_is_told_to_and_alone(script: Executor) -> None:
    bind(script, 16)
    meta = SliceMeta(CHAT, {"script_fail_at": "3", "script_split": "2"}, generated=4)
    other = SliceMeta(CHAT, {}, generated=0)
    batch = [Slice(CHAT, 0, range(8), 1, meta), Slice(CHAT, 0, range(8, 16), 1, other)]
    failed, fine = script.step(batch)
    assert failure(failed) == "scripted failure at step 3"
    assert rows(fine).shape == (1, 272)
    before = SliceMeta(CHAT, {"script_fail_at": "3", "script_split": "2"}, generated=2)
    assert rows(script.step([Slice(CHAT, 0, range(8), 1, before)])[0]).shape == (1, 272)


@pytest.mark.parametrize("metadata", [{"script_fail_at": "soon"}, {"script_split": "1,0"}])
def test_metadata_that_cannot_be_followed_fails_the_slice(script: Executor, metadata: dict[str, str]) -> None:
    bind(script, 16)
    meta = SliceMeta(CHAT, {"script_fail_at": "9", **metadata})
    bad, fine = script.step(
        [Slice(CHAT, 0, range(8), 1, meta), Slice(CHAT, 0, range(8, 16), 1, SliceMeta(CHAT))]
    )
    assert "is no number above 0" in failure(bad)
    assert rows(fine).shape == (1, 272)


def computed(script: Executor) -> bytearray:
    arena = bind(script, 8)
    assert script.step([Slice(CHAT, 0, range(8), 0)]) == [None]
    return arena


def next_step(script: Executor, pages: list[int]) -> object:
    return script.step([Slice([65], len(CHAT), pages, 1, SliceMeta(CHAT, {}, 1))])[0]


def test_pages_are_checked_on_every_step(script: Executor) -> None:
    size = script.info.layout.page_bytes
    arena = computed(script)
    assert rows(next_step(script, list(range(8)))).shape == (1, 272)
    arena[size + 16] ^= 1  # the second record of the second page
    assert "position 17 " in failure(next_step(script, list(range(8))))


def test_a_wrong_page_is_noticed(script: Executor) -> None:
    computed(script)
    assert "position 16 " in failure(next_step(script, [0, 2, 1, 3, 4, 5, 6, 7]))


def test_pages_of_another_prompt_are_noticed(script: Executor) -> None:
    computed(script)
    other = [*CHAT[:5], 66, *CHAT[6:]]
    result = script.step([Slice([65], len(other), range(8), 1, SliceMeta(other, {}, 1))])[0]
    assert "position 5 " in failure(result)


def test_pages_are_small(script: Executor) -> None:
    assert script.info.layout.page_bytes == 256


def test_it_can_say_its_text_for_ever(script: Executor) -> None:
    generation = say(script, CHAT, tokens=3 * len(TEXT), script_repeat="1", script_split="3")
    assert generation.tokens == [*TEXT] * 3
    assert generation.finish_reason == "length"


def test_steps_keep_a_pace_whatever_they_take(script: Executor) -> None:
    started = time.monotonic()
    say(script, CHAT, tokens=5, script_pace_ms="20", script_delay_ms="10")
    # The first is due at once.
    assert 4 * 0.020 <= time.monotonic() - started < 5


def test_checking_the_tail_costs_the_same_at_every_depth_and_notices_a_wrong_last_page() -> None:
    script = engine.load("script:check=tail")
    size = script.info.layout.page_bytes
    arena = computed(script)
    arena[16] ^= 1  # far before: not looked at
    rows(next_step(script, list(range(8))))
    last = len(CHAT)  # the record that the step has just written
    arena[last // 16 * size + last % 16 * 16 + 4] ^= 1
    step = script.step([Slice([66], last + 1, range(8), 1, SliceMeta(CHAT, {}, 2))])[0]
    assert f"position {last} " in failure(step)


def test_it_speaks_with_the_words_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(metadata_file(metadata()))
    source = f"script:text={path},check=tail"
    script, text = engine.load(source), load_text_model(source)
    prompt = text.tokenizer.encode("abc 123", add_special=False, parse_special=False)
    assert script.info.vocab_size == text.vocab_size
    generation = Generation(prompt, SamplingParams(temperature=0), 100, text.end_ids)
    generate_batch(script, [generation])
    assert generation.tokens[:-1] == prompt
    assert generation.tokens[-1] in text.end_ids


@pytest.mark.parametrize("options", ["check=some", "text=", "speed=9"])
def test_unknown_options_are_refused(options: str) -> None:
    with pytest.raises(EngineError, match="options are text"):
        engine.load(f"script:{options}")
