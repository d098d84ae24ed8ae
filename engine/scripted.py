"""A model that says exactly what it is told: the text of the last user message, then the end token.

It takes the whole path including pages: each step writes one record per token (the token and a rolling
digest of everything before it) into its pages, and checks on every step that the records of all earlier
tokens are still there. A page that was lost, shared by mistake or handed over wrongly therefore fails the
request and nothing else. Imports no torch.

Behaviour is steered by request metadata: `script_split` ("1,3,2": tokens per step, repeated from the start
when used up), `script_delay_ms` (how long a step takes), `script_fail_at` (the k-th generation step fails).
"""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.executor import (
    Arena,
    EngineInfo,
    Logits,
    Slice,
    SliceFailure,
    SliceMeta,
    StepResult,
    check_arena,
    check_slice,
)
from engine.paging import LayerCache, page_geometry
from text.byte_tokenizer import END_ID, SCRIPT_CONTEXT_LENGTH, USER_ID, VOCAB_SIZE

RECORD_FLOATS = 4
CERTAIN = 1e6
"""Logit of the scripted token: far above what bias, penalties and temperature can undo."""
FILLER = 32
"""What is said while the end token is banned: a space."""

_RECORD = np.dtype([("token", "<u4"), ("mark", "<u4"), ("digest", "<u8")])
_MARK = 0x5C819700
_MULTIPLIER = np.uint64(6364136223846793005)

Records = NDArray[np.void]


class ScriptedExecutor:
    """`script:`. Implements `engine.executor.Executor`."""

    def __init__(self, *, page_tokens: int = 16) -> None:
        caches = [LayerCache(layer=0, heads=1, dim=RECORD_FLOATS)]
        layout = page_geometry(caches, page_tokens=page_tokens, dtype="f32", kinds=("k",))
        self.info = EngineInfo(
            name="script",
            architecture="script",
            vocab_size=VOCAB_SIZE,
            context_length=SCRIPT_CONTEXT_LENGTH,
            hidden_size=RECORD_FLOATS,
            layers=1,
            layout=layout,
            kv_dtype="f32",
            rope="none",
            weights_digest=blake2b(b"script:", digest_size=16).digest(),
            numerics_id="script/1",
            weights_bytes=0,
        )
        self._pages: Records | None = None

    def bind(self, arena: Arena, pages: int, page_bytes: int) -> None:
        view = check_arena(arena, pages, page_bytes, self.info.layout)
        used = self.info.layout.page_tokens * _RECORD.itemsize
        raw = np.frombuffer(view, np.uint8, pages * page_bytes).reshape(pages, page_bytes)
        self._pages = raw[:, :used].view(_RECORD)

    def step(self, batch: Sequence[Slice]) -> list[StepResult]:
        if self._pages is None:
            raise EngineError("step before bind: there is no pool to work in")
        delays = [_delay_s(slice_.meta.metadata) for slice_ in batch if slice_.meta and slice_.logits]
        if delays and max(delays) > 0:
            time.sleep(max(delays))
        return [self._try(slice_, self._pages) for slice_ in batch]

    def draft(self, meta: SliceMeta) -> list[int]:
        script = script_of(meta.prompt)
        try:
            _, count = _step_at(meta)
        except _BadMetadata:  # the step itself says so
            return []
        return script[meta.generated : min(meta.generated + count - 1, len(script) - 1)]

    def _try(self, slice_: Slice, pages: Records) -> StepResult:
        try:
            return self._run(slice_, pages)
        except _BadMetadata as error:
            return SliceFailure(str(error))

    def _run(self, slice_: Slice, pages: Records) -> StepResult:
        problem = check_slice(slice_, self.info, len(pages))
        if problem is not None:
            return SliceFailure(problem)
        meta = slice_.meta
        if meta is not None and slice_.logits:
            fail_at = meta.metadata.get("script_fail_at")
            if fail_at is not None and _step_at(meta)[0] + 1 == _number(fail_at, "script_fail_at"):
                return SliceFailure(f"scripted failure at step {fail_at}")
        problem = self._write(slice_, pages)
        if problem is not None:
            return SliceFailure(problem)
        if not slice_.logits:
            return None
        if meta is None:
            return SliceFailure("a scripted model needs the prompt to give logits")
        return self._logits(slice_, meta)

    def _write(self, slice_: Slice, pages: Records) -> str | None:
        """Checks what lies in the pages, then adds the new tokens. Says what is wrong, if anything is."""
        page_tokens = self.info.layout.page_tokens
        end = slice_.start + len(slice_.tokens)
        positions = np.arange(end)
        table = np.asarray(slice_.pages[: self.info.layout.pages_for(end)], dtype=np.int64)
        rows, columns = table[positions // page_tokens], positions % page_tokens
        past = pages[rows[: slice_.start], columns[: slice_.start]]
        problem = _broken(past, slice_)
        if problem is not None:
            return problem
        new = np.zeros(len(slice_.tokens), _RECORD)
        digest = past["digest"][-1] if slice_.start else np.uint64(0)
        with np.errstate(over="ignore"):
            for index, token in enumerate(slice_.tokens):
                digest = digest * _MULTIPLIER + np.uint64(token + 1)
                new[index] = (token, _MARK + slice_.start + index, digest)
        pages[rows[slice_.start :], columns[slice_.start :]] = new
        return None

    def _logits(self, slice_: Slice, meta: SliceMeta) -> Logits:
        script = script_of(meta.prompt)
        logits = np.zeros((slice_.logits, VOCAB_SIZE), np.float32)
        logits[:, FILLER] = CERTAIN / 1e3
        first = slice_.start + len(slice_.tokens) - slice_.logits
        for row in range(slice_.logits):
            said = first + row + 1 - len(meta.prompt)
            logits[row, script[said] if 0 <= said < len(script) else END_ID] = CERTAIN
        return logits


def script_of(prompt: Sequence[int]) -> list[int]:
    """What the model will say: the last user message (the whole prompt if there is none), then the end."""
    start, end = 0, len(prompt)
    for index in range(len(prompt) - 1, -1, -1):
        if prompt[index] == USER_ID:
            start = index + 1
            break
    else:
        return [*prompt, END_ID]
    for index in range(start, len(prompt)):
        if prompt[index] == END_ID:
            end = index
            break
    return [*prompt[start:end], END_ID]


def _broken(past: Records, slice_: Slice) -> str | None:
    """Where the records of earlier tokens are not what was written, in words."""
    if not len(past):
        return None
    tokens, digests = past["token"].astype(np.uint64), past["digest"]
    wrong = past["mark"] != np.uint32(_MARK) + np.arange(len(past), dtype=np.uint32)
    before = np.concatenate([np.zeros(1, np.uint64), digests[:-1]])
    with np.errstate(over="ignore"):
        wrong |= digests != before * _MULTIPLIER + tokens + np.uint64(1)
    if slice_.meta is not None:
        prompt = np.asarray(slice_.meta.prompt[: len(past)], dtype=np.uint64)
        wrong[: len(prompt)] |= tokens[: len(prompt)] != prompt
    if not wrong.any():
        return None
    position = int(wrong.argmax())
    return f"the page of position {position} does not hold what was written there"


def _step_at(meta: SliceMeta) -> tuple[int, int]:
    """Which generation step (from 0) comes next, and how many tokens it is to give."""
    split = meta.metadata.get("script_split")
    if not split:
        return meta.generated, 1
    sizes = [_number(part.strip(), "script_split") for part in split.split(",")]
    ends = list(accumulate(sizes))
    rounds, inside = divmod(meta.generated, ends[-1])
    index = next(i for i, end in enumerate(ends) if inside < end)
    return rounds * len(sizes) + index, ends[index] - inside


def _number(text: str, key: str) -> int:
    """A metadata value as a number above 0."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        raise _BadMetadata(f"{key}: {text[:40]!r} is no number above 0")
    return int(text)


def _delay_s(metadata: Mapping[str, str]) -> float:
    text = metadata.get("script_delay_ms", "")
    try:
        return min(max(0.0, float(text or 0)), 60_000.0) / 1e3
    except ValueError:
        return 0.0


class _BadMetadata(Exception):
    """A script_* value that cannot be followed."""
