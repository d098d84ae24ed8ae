"""One step in the engine's own thread: compute, sample, copy pages for forks.

Blocks, and touches only what the loop leaves alone while a step is running. What
goes wrong with one sequence is that sequence's outcome; an error of the whole
step is narrowed down by halving the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from decode.choice import Choice
from decode.frames import Logprobs
from decode.masks import Masks, StepMasks
from decode.request import Request
from decode.scheduler import Part
from engine import Executor, Slice, SliceFailure, SliceMeta
from engine.executor import Logits, StepResult
from engine.sampling import Sampled, SampleFailure, SampleRow, sample, score
from text.grammar import Allowed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failed:
    """Why this sequence has no result. The message may be shown to the client."""

    message: str
    code: str = "step_failed"


Outcome = list[Sampled] | Failed


class Stepper:
    """`arena` is the pool of pages of `page_bytes` each that `executor` is bound to."""

    def __init__(self, executor: Executor, arena: memoryview, page_bytes: int) -> None:
        self._executor = executor
        self._arena = arena
        self._page_bytes = page_bytes
        self._masks = Masks()

    def close(self) -> None:
        """No step may follow."""
        self._masks.close()

    def draft(self, request: Request, choice: Choice) -> list[int]:
        """Tokens that the model wants to have verified in this step; [] for most models."""
        try:
            return self._executor.draft(_meta(request, choice))
        except Exception:
            # The step itself will say what is wrong, to this request alone.
            log.exception("no draft for request %s", request.opening.request_id)
            return []

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """One outcome per part: the samples of its rows, [] where none were asked for, or its failure."""
        masks = self._masks.begin(parts)
        try:
            results = self._executor.step([_slice(part) for part in parts])
        except Exception:
            if len(parts) == 1:
                log.exception("the step failed for request %s", parts[0].request.opening.request_id)
                return [Failed("the model failed on this request")]
            log.warning("a step of %d sequences failed; halving it", len(parts))
            half = len(parts) // 2
            return [*self.run(parts[:half]), *self.run(parts[half:])]
        return [self._finish(part, result, masks) for part, result in zip(parts, results, strict=True)]

    def _finish(self, part: Part, result: StepResult, masks: StepMasks) -> Outcome:
        if isinstance(result, SliceFailure):
            return Failed(result.message)
        if result is None:
            return [] if not part.samples else Failed("the model gave no logits")
        if part.request.scoring:
            failure = _score(part, result)
            if failure is not None:
                return failure
        last = part.choice.computed + part.count - 1
        for page in part.fork:
            self._copy(part.choice.table[last // self._page_tokens].index, page.index)
        try:
            allowed = masks.of(part.choice)
            if part.choice.matcher is not None and part.choice.matcher.error is not None:
                return Failed(part.choice.matcher.error, code="grammar_too_complex")
            return _sample(part, result, allowed)
        except Exception:
            log.exception("sampling failed for request %s", part.request.opening.request_id)
            return Failed("no token could be sampled for this request")

    @property
    def _page_tokens(self) -> int:
        return self._executor.info.layout.page_tokens

    def _copy(self, source: int, target: int) -> None:
        size = self._page_bytes
        self._arena[target * size : (target + 1) * size] = self._arena[source * size : (source + 1) * size]


def _slice(part: Part) -> Slice:
    choice = part.choice
    tokens = [*choice.tokens[choice.computed : choice.computed + part.count], *part.drafts]
    wanted = 1 + len(part.drafts) if part.samples else 0
    return Slice(
        tokens=tokens,
        start=choice.computed,
        pages=[page.index for page in choice.table],
        logits=len(tokens) if part.request.scoring else wanted,
        meta=_meta(part.request, choice),
    )


def _meta(request: Request, choice: Choice) -> SliceMeta:
    return SliceMeta(request.prompt, request.opening.metadata, choice.generated)


def _score(part: Part, logits: Logits) -> Failed | None:
    """Keeps what the rows said of the prompt tokens after them."""
    request, choice = part.request, part.choice
    following = choice.tokens[choice.computed + 1 : choice.computed + part.count + 1]
    for item in score(logits[: len(following)], following, request.opening.prompt_logprobs or 0):
        if isinstance(item, SampleFailure):
            return Failed(item.message, code="no_sample")
        request.scored.append(Logprobs(item.logprob or 0.0, item.top))
    return None


def _sample(part: Part, logits: StepResult, allowed: Sequence[Allowed] | None) -> Outcome:
    """`allowed` ends at the first draft that a grammar forbids: what comes after that is not taken anyway."""
    assert logits is not None
    assert not isinstance(logits, SliceFailure)
    if not part.samples:
        return []
    logits = logits[-1 - len(part.drafts) :]
    opening, choice = part.request.opening, part.choice
    if not part.request.forked and opening.n > 1:
        rows = [_row(part, choice.index + place, (), _at(allowed, 0)) for place in range(opening.n)]
        logits = logits.repeat(opening.n, axis=0)
    else:
        rows = [
            _row(part, choice.index, part.drafts[:place], _at(allowed, place))
            for place in range(1 + len(part.drafts))
        ]
    samples: list[Sampled] = []
    for item in sample(logits, rows):
        if isinstance(item, SampleFailure):
            return Failed(item.message, code="no_sample")
        samples.append(item)
    return samples


def _at(allowed: Sequence[Allowed] | None, place: int) -> Allowed | None:
    return allowed[place] if allowed is not None and place < len(allowed) else None


def _row(part: Part, index: int, drafts: Sequence[int], allowed: Allowed | None) -> SampleRow:
    """The row after `drafts`, as if they had been accepted."""
    opening, choice = part.request.opening, part.choice
    position = choice.generated + len(drafts)
    return SampleRow(
        params=opening.sampling,
        choice=index,
        position=position,
        context=choice.tokens if not drafts else [*choice.tokens, *drafts],
        prompt_len=len(part.request.prompt),
        banned=tuple(opening.stop_ids) if position < opening.min_tokens else (),
        allowed=allowed,
    )
