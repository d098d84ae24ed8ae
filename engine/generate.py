"""Generation alone in one process: the plain twin of the mesh, and what its output is compared with.

A pool in ordinary memory, pages handed out in order, all prompts in one continuous batch: each step gives
every sequence either its next chunk of prompt or its next token. No services, no sharing, no preemption.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.executor import Executor, Slice, SliceFailure, SliceMeta
from engine.sampling import Sampled, SampleFailure, SampleRow, SamplingParams, sample


@dataclass(slots=True)
class Generation:
    """One sequence to generate, and what came of it."""

    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: AbstractSet[int] = frozenset()
    min_tokens: int = 0
    choice: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop", "length", or None while it runs."""


def generate(
    executor: Executor,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    n_tokens: int,
    *,
    stop_ids: AbstractSet[int] = frozenset(),
    chunk_tokens: int = 256,
) -> list[int]:
    """The tokens that follow the prompt, a stop token included. Raises EngineError if the model fails."""
    return generate_batch(
        executor, [Generation(prompt_ids, params, n_tokens, stop_ids)], chunk_tokens=chunk_tokens
    )[0]


def generate_batch(
    executor: Executor, generations: Sequence[Generation], *, chunk_tokens: int = 256
) -> list[list[int]]:
    """All of them in one continuous batch. Binds the executor to a pool of its own."""
    layout = executor.info.layout
    limit = executor.info.context_length
    for generation in generations:
        if not 0 < len(generation.prompt) <= limit:
            raise EngineError(f"a prompt of {len(generation.prompt)} tokens; 1 to {limit} are possible")
    needs = [layout.pages_for(min(len(g.prompt) + g.max_tokens, limit)) for g in generations]
    executor.bind(bytearray(max(1, sum(needs)) * layout.page_bytes), max(1, sum(needs)), layout.page_bytes)
    running: list[_Sequence] = []
    first = 0
    for generation, need in zip(generations, needs, strict=True):
        running.append(_Sequence(generation, range(first, first + need)))
        first += need
    running = [sequence for sequence in running if not sequence.ended(limit)]
    while running:
        slices = [sequence.next_slice(executor, chunk_tokens) for sequence in running]
        results = executor.step(slices)
        for sequence, slice_, result in zip(running, slices, results, strict=True):
            if isinstance(result, SliceFailure):
                raise EngineError(result.message)
            sequence.computed = slice_.start + len(slice_.tokens)
            if result is not None:
                sequence.accept(result, slice_, limit)
        running = [sequence for sequence in running if not sequence.ended(limit)]
    return [generation.tokens for generation in generations]


class _Sequence:
    """One generation on its pages."""

    def __init__(self, generation: Generation, pages: Sequence[int]) -> None:
        self.generation = generation
        self.pages = pages
        self.known = list(generation.prompt)
        self.computed = 0
        self.drafts: list[int] = []

    def ended(self, limit: int) -> bool:
        generation = self.generation
        if generation.finish_reason is None and (
            len(generation.tokens) >= generation.max_tokens or len(self.known) >= limit
        ):
            generation.finish_reason = "length"
        return generation.finish_reason is not None

    def next_slice(self, executor: Executor, chunk_tokens: int) -> Slice:
        new = self.known[self.computed : self.computed + chunk_tokens]
        last = self.computed + len(new) == len(self.known)
        meta = SliceMeta(self.generation.prompt, self.generation.metadata, len(self.generation.tokens))
        room = self.generation.max_tokens - len(self.generation.tokens) - 1
        self.drafts = executor.draft(meta)[: max(0, room)] if last else []
        return Slice(
            tokens=[*new, *self.drafts],
            start=self.computed,
            pages=self.pages,
            logits=1 + len(self.drafts) if last else 0,
            meta=meta,
        )

    def accept(self, logits: object, slice_: Slice, limit: int) -> None:
        """Samples row by row as long as each draft is what was sampled."""
        generation = self.generation
        for row in range(slice_.logits):
            position = len(generation.tokens)
            sampled = sample(
                logits[row : row + 1],  # type: ignore[index]
                [
                    SampleRow(
                        params=generation.params,
                        choice=generation.choice,
                        position=position,
                        context=self.known,
                        prompt_len=len(generation.prompt),
                        banned=sorted(generation.stop_ids) if position < generation.min_tokens else (),
                    )
                ],
            )[0]
            if isinstance(sampled, SampleFailure):
                raise EngineError(sampled.message)
            generation.tokens.append(sampled.token)
            generation.sampled.append(sampled)
            self.known.append(sampled.token)
            if sampled.token in generation.stop_ids:
                generation.finish_reason = "stop"
            refused = row >= len(self.drafts) or self.drafts[row] != sampled.token
            if refused or self.ended(limit):
                break
        # Rows of refused drafts will be written again.
        self.computed = len(self.known) - 1
