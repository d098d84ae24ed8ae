import pytest

import engine
from engine import EngineError, Executor
from engine.generate import Generation, generate, generate_batch
from engine.sampling import SamplingParams

PROMPTS = [list(f"prompt number {i}, {'with some more of it ' * (i % 5)}".encode()) for i in range(8)]
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tiny() -> Executor:
    return engine.load("tiny:seed=2")


def test_a_batch_gives_what_each_prompt_gives_alone(tiny: Executor) -> None:
    params = [SamplingParams(temperature=0.9, seed=i) if i % 2 else GREEDY for i in range(8)]
    together = [Generation(prompt, p, 20) for prompt, p in zip(PROMPTS, params, strict=True)]
    generate_batch(tiny, together, chunk_tokens=9)
    for generation, p in zip(together, params, strict=True):
        assert generation.tokens == generate(tiny, generation.prompt, p, 20)
        assert len(generation.tokens) == 20
    assert len({tuple(generation.tokens) for generation in together}) == 8


@pytest.mark.parametrize("neighbour", [GREEDY, SamplingParams(seed=3), SamplingParams(temperature=2.0)])
def test_a_seeded_request_does_not_depend_on_its_batch(tiny: Executor, neighbour: SamplingParams) -> None:
    seeded = SamplingParams(temperature=0.9, seed=1234)
    alone = generate(tiny, PROMPTS[0], seeded, 24)
    batch = [Generation(PROMPTS[1], neighbour, 24), Generation(PROMPTS[0], seeded, 24)]
    assert generate_batch(tiny, batch)[1] == alone


def test_choices_of_one_seed_differ_and_repeat(tiny: Executor) -> None:
    seeded = SamplingParams(temperature=1.0, seed=9)

    def pair() -> list[list[int]]:
        return generate_batch(tiny, [Generation(PROMPTS[0], seeded, 16, choice=c) for c in (0, 1)])

    first, second = pair()
    assert first != second
    assert pair() == [first, second]


def test_a_continuation_of_a_seeded_request_is_the_same(tiny: Executor) -> None:
    """As after a death: the prompt and what was generated become the new prompt, the position goes on."""
    whole = generate(tiny, PROMPTS[3], GREEDY, 20)
    assert generate(tiny, PROMPTS[3] + whole[:7], GREEDY, 13) == whole[7:]


def test_stop_ids_and_min_tokens(tiny: Executor) -> None:
    whole = generate(tiny, PROMPTS[2], GREEDY, 20)
    stop = whole[5]
    first = whole.index(stop)
    stopped = Generation(PROMPTS[2], GREEDY, 20, frozenset({stop}))
    assert generate_batch(tiny, [stopped]) == [whole[: first + 1]]
    assert stopped.finish_reason == "stop"
    kept = Generation(PROMPTS[2], GREEDY, 20, frozenset({stop}), min_tokens=15)
    assert len(generate_batch(tiny, [kept])[0]) >= 15
    assert stop not in kept.tokens[:15]


def test_the_context_ends_a_generation() -> None:
    small = engine.load("tiny:seed=2,context=32")
    generation = Generation(list(range(65, 90)), GREEDY, 100)
    generate_batch(small, [generation])
    assert len(generation.prompt) + len(generation.tokens) == 32
    assert generation.finish_reason == "length"
    with pytest.raises(EngineError, match="1 to 32"):
        generate(small, list(range(33)), GREEDY, 1)
