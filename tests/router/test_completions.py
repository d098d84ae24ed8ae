"""`/v1/completions`: echo, scored prompts, best_of, suffix."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvmesh.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from tests.router.fakes import END, text_script
from tests.router.world import World, events, grpc_channel, world
from tests.text import gguf_builder as build
from tests.text.small_bpe import CONTROL, metadata


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world() as made:
        yield made


async def test_echo_says_the_prompt_before_the_answer(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script(" more")
    for prompt, shown in (("héllo", "héllo"), ([*b"abc", 260], "abc<|assistant|>")):
        answer = (await mesh.complete(prompt, echo=True)).json()
        assert answer["choices"][0]["text"] == shown + " more"
        assert answer["choices"][0]["logprobs"] is None
        streamed = events((await mesh.complete(prompt, echo=True, stream=True)).text)
        texts = [chunk["choices"][0]["text"] for chunk in streamed if chunk != "[DONE]"]
        assert "".join(texts) == shown + " more"
        assert texts[0].startswith(shown)
    assert not mesh.worker.opened[0].HasField("prompt_logprobs")


async def test_echo_with_logprobs_scores_the_prompt(mesh: World) -> None:
    """What evaluation harnesses ask for. Nobody else's blocks are used, and no prefill worker."""
    mesh.worker.behaviour.script = text_script("!")
    mesh.worker.behaviour.have = lambda open_: 0
    prompt = "aé" * 20
    answer = (await mesh.complete(prompt, echo=True, logprobs=1, max_tokens=1)).json()
    said = answer["choices"][0]
    assert said["text"] == prompt + "!"
    logprobs, raw = said["logprobs"], prompt.encode()
    assert len(logprobs["tokens"]) == len(raw) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx([-byte / 100 for byte in raw[1:]])
    assert logprobs["text_offset"] == [*(len(raw[:i].decode(errors="ignore")) for i in range(len(raw))), 40]
    [opened] = mesh.worker.opened
    assert opened.prompt_logprobs == 1
    assert not mesh.prefill[0].runs
    assert answer["usage"]["prompt_tokens"] == len(raw)
    again = (await mesh.complete(prompt, echo=True, logprobs=1, max_tokens=1)).json()
    assert again["choices"] == answer["choices"]
    assert mesh.worker.opened[1].root_id != opened.root_id


async def test_echo_of_several_prompts_and_choices_streamed_as_plain(mesh: World) -> None:
    mesh.worker.behaviour.logprobs = True
    body = {"prompt": ["one", "three"], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 4}
    plain = (await mesh.complete(**body)).json()["choices"]
    assert [choice["text"] for choice in plain] == ["oneone"] * 2 + ["threethre"] * 2
    whole: dict[int, dict[str, Any]] = {}
    for chunk in events((await mesh.complete(**body, stream=True)).text):
        for choice in [] if chunk == "[DONE]" else chunk["choices"]:
            known = whole.setdefault(choice["index"], {"text": "", "tokens": [], "lps": [], "offsets": []})
            known["text"] += choice["text"]
            if choice["logprobs"]:
                known["tokens"] += choice["logprobs"]["tokens"]
                known["lps"] += choice["logprobs"]["token_logprobs"]
                known["offsets"] += choice["logprobs"]["text_offset"]
    for choice in plain:
        same = whole[choice["index"]]
        assert same["text"] == choice["text"]
        assert same["tokens"] == choice["logprobs"]["tokens"]
        assert same["lps"] == choice["logprobs"]["token_logprobs"]
        assert same["offsets"] == choice["logprobs"]["text_offset"]


async def test_no_token_may_be_asked_for_where_the_prompt_is_said_again(mesh: World) -> None:
    """`max_tokens: 0` scores a prompt and adds nothing to it. Without `echo` it asks for nothing: 400."""
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await mesh.complete("abc", echo=True, logprobs=2, max_tokens=0, stream=stream, **options)
        assert answer.status_code == 200
        if stream:
            chunks = events(answer.text)
            [choice] = [c for chunk in chunks[:-1] for c in chunk["choices"]]
            usage = chunks[-2]["usage"]
        else:
            [choice] = answer.json()["choices"]
            usage = answer.json()["usage"]
        assert choice["text"] == "abc"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert list(choice["logprobs"]["top_logprobs"][1].values()) == pytest.approx([-0.98, -1.98])
        assert choice["finish_reason"] == "length"
        assert usage["completion_tokens"] == 0
        assert usage["total_tokens"] == 3


async def test_a_worker_that_dies_before_the_scores_is_replaced_and_later_is_continued(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("abcdef")
    mesh.worker.behaviour.incident, mesh.worker.behaviour.incident_after = "preempt", 2
    answer = (await mesh.complete("xy" * 20, echo=True, logprobs=0)).json()
    assert answer["choices"][0]["text"] == "xy" * 20 + "abcdef"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 40 + 7
    first, second = mesh.worker.opened
    assert (first.HasField("prompt_logprobs"), second.HasField("prompt_logprobs")) == (True, False)


async def test_best_of_shows_the_likeliest(mesh: World) -> None:
    # The fake's log-probability falls with the id: "aaa" is likelier than "zzz".
    mesh.worker.behaviour.script = lambda prompt, choice: [*(b"zzz", b"aaa", b"mmm")[choice % 3], END]
    answer = (await mesh.complete(["x", "y"], n=2, best_of=3)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "aaa"), (1, "mmm"), (2, "aaa"), (3, "mmm"),
    ]  # fmt: skip
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 4
    assert (await mesh.complete("x", n=2, best_of=2)).json()["choices"][0]["text"] == "zzz"


async def test_prompts_are_scored_over_grpc_too(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("!")
    metadata = tuple(mesh.headers().items())
    async with grpc_channel(mesh) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            model="tiny", text="abc", prompt_logprobs=1, stop=common_pb2.StopParams(max_tokens=3)
        )
        messages = [message async for message in stub.Generate(request, metadata=metadata)]
    assert [round(p.logprob, 6) for p in messages[0].prompt_logprobs] == [-0.98, -0.99]
    assert [len(p.top) for p in messages[0].prompt_logprobs] == [1, 1]
    assert not any(message.prompt_logprobs for message in messages[1:])


async def test_suffix_is_filled_in_by_models_that_can(tmp_path: Path) -> None:
    keys = metadata()
    first = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] += ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    keys["tokenizer.ggml.token_type"] += [CONTROL] * 3
    path = tmp_path / "coder.gguf"
    path.write_bytes(build.metadata_file(keys))
    async with world(prefill=0, source=str(path)) as mesh:
        answer = await mesh.complete("de", suffix="fg", max_tokens=2)
        assert answer.status_code == 200, answer.text
        ids = list(mesh.worker.opened[0].prompt.segments[0].tokens.ids)
    assert ids == [first, *b"de", first + 1, *b"fg", first + 2]
