"""A model that says exactly what it is told: the text of the last user message, then the end token.

It takes the whole path including pages: each step writes one record per token (the token and a rolling
digest of everything before it) into its pages, and checks on every step that the records of all earlier
tokens are still there. A page that was lost, shared by mistake or handed over wrongly therefore fails the
request and nothing else. Imports no torch.

Behaviour is steered by request metadata: `script_split` ("1,3,2": tokens per step, repeated from the start
when used up), `script_delay_ms` (how long a step takes), `script_pace_ms` (how far apart steps end, whatever
they take themselves), `script_fail_at` (the k-th generation step fails),
`script_repeat` (anything: the text is said again and again and never ends).

`script:text=PATH` takes tokenizer and template from another model; without the markers of the byte
tokenizer it says its whole prompt. `script:check=tail` looks at the last record only, so that a step
costs the same at every depth: for benchmarks of everything but the engine. Both with a comma between.
"""

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_ONE = struct.Struct("<IIQ")
_MARK = 0x5C819700
_MULTIPLIER = np.uint64(6364136223846793005)
_INVERSE = np.uint64(pow(6364136223846793005, -1, 2**64))

Records = NDArray[np.void]


class ScriptedExecutor:
    """`script:`. Implements `engine.executor.Executor`."""

    def __init__(
        self,
        *,
        page_tokens: int = 16,
        vocab_size: int = VOCAB_SIZE,
        end_id: int = END_ID,
        context_length: int = SCRIPT_CONTEXT_LENGTH,
        checks_all: bool = True,
    ) -> None:
        self._end_id = end_id
        self._checks_all = checks_all
        caches = [LayerCache(layer=0, heads=1, dim=RECORD_FLOATS)]
        layout = page_geometry(caches, page_tokens=page_tokens, dtype="f32", kinds=("k",))
        self.info = EngineInfo(
            name="script",
            architecture="script",
            vocab_size=vocab_size,
            context_length=context_length,
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
        self._raw = memoryview(b"")
        self._page_bytes = 0
        self._due = 0.0

    @classmethod
    def of(cls, source: str, *, page_tokens: int = 16) -> "ScriptedExecutor":
        """`source` is `script:` with its options. Raises EngineError, or TextError for a bad model."""
        options = script_options(source.removeprefix("script:"))
        checks_all = options.check == "all"
        if not options.text:
            return cls(page_tokens=page_tokens, checks_all=checks_all)
        # Imported where it is needed: most scripted models speak in bytes.
        from text import load_text_model

        text = load_text_model(options.text)
        return cls(
            page_tokens=page_tokens,
            vocab_size=text.vocab_size,
            end_id=min(text.end_ids, default=0),
            context_length=text.context_length,
            checks_all=checks_all,
        )

    def bind(self, arena: Arena, pages: int, page_bytes: int) -> None:
        view = check_arena(arena, pages, page_bytes, self.info.layout)
        self._raw, self._page_bytes = view, page_bytes
        used = self.info.layout.page_tokens * _RECORD.itemsize
        raw = np.frombuffer(view, np.uint8, pages * page_bytes).reshape(pages, page_bytes)
        self._pages = raw[:, :used].view(_RECORD)

    def step(self, batch: Sequence[Slice]) -> list[StepResult]:
        if self._pages is None:
            raise EngineError("step before bind: there is no pool to work in")
        metas = [slice_.meta.metadata for slice_ in batch if slice_.meta and slice_.logits]
        delay_s = max((_seconds(metadata, "script_delay_ms") for metadata in metas), default=0.0)
        if delay_s > 0:
            time.sleep(delay_s)
        self._keep_pace(max((_seconds(metadata, "script_pace_ms") for metadata in metas), default=0.0))
        return [self._try(slice_, self._pages) for slice_ in batch]

    def _keep_pace(self, pace_s: float) -> None:
        """Waits until the next step is due. One that is late is not made up for if it is late by two."""
        if pace_s <= 0:
            return
        now = time.monotonic()
        if now > self._due + 2 * pace_s:
            self._due = now
        time.sleep(max(0.0, self._due - now))
        self._due += pace_s

    def draft(self, meta: SliceMeta) -> list[int]:
        try:
            _, count = _step_at(meta)
        except _BadMetadata:  # the step itself says so
            return []
        script = script_of(meta.prompt, self._end_id)
        if "script_repeat" in meta.metadata:
            return [
                script[at % (len(script) - 1)] for at in range(meta.generated, meta.generated + count - 1)
            ]
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
        if not self._checks_all and slice_.start and len(slice_.tokens) == 1:
            return self._write_one(slice_)
        page_tokens = self.info.layout.page_tokens
        begin = 0 if self._checks_all else max(0, slice_.start - 1)
        known = slice_.start - begin
        end = slice_.start + len(slice_.tokens)
        positions = np.arange(begin, end)
        table = np.asarray(slice_.pages[: self.info.layout.pages_for(end)], dtype=np.int64)
        rows, columns = table[positions // page_tokens], positions % page_tokens
        past = pages[rows[:known], columns[:known]]
        problem = _broken(past, begin, slice_)
        if problem is not None:
            return problem
        new = np.zeros(len(slice_.tokens), _RECORD)
        new["token"] = slice_.tokens
        new["mark"] = np.arange(_MARK + slice_.start, _MARK + end, dtype=np.uint32)
        new["digest"] = _digests(past["digest"][-1] if known else np.uint64(0), new["token"])
        pages[rows[known:], columns[known:]] = new
        return None

    def _write_one(self, slice_: Slice) -> str | None:
        """As `_write`, for the one token of a step that looks at the last record only."""
        before = slice_.start - 1
        token, mark, digest = _ONE.unpack_from(self._raw, self._at(slice_, before))
        expected = slice_.meta.prompt[before] if slice_.meta and before < len(slice_.meta.prompt) else token
        if mark != _MARK + before or token != expected:
            return f"the page of position {before} does not hold what was written there"
        [token] = slice_.tokens
        digest = (digest * int(_MULTIPLIER) + token + 1) % 2**64
        _ONE.pack_into(self._raw, self._at(slice_, slice_.start), token, _MARK + slice_.start, digest)
        return None

    def _at(self, slice_: Slice, position: int) -> int:
        """Where the record of a position lies in the arena."""
        page, column = divmod(position, self.info.layout.page_tokens)
        return slice_.pages[page] * self._page_bytes + column * _ONE.size

    def _logits(self, slice_: Slice, meta: SliceMeta) -> Logits:
        script = script_of(meta.prompt, self._end_id)
        if "script_repeat" in meta.metadata:
            script.pop()
        logits = np.zeros((slice_.logits, self.info.vocab_size), np.float32)
        first = slice_.start + len(slice_.tokens) - slice_.logits
        for row in range(slice_.logits):
            said = first + row + 1 - len(meta.prompt)
            if "script_repeat" in meta.metadata and script:
                said %= len(script)
            logits[row, FILLER] = CERTAIN / 1e3
            logits[row, script[said] if 0 <= said < len(script) else self._end_id] = CERTAIN
        return logits


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """`text` is the path of the model whose tokenizer is used ("": bytes); `check` is all or tail."""

    text: str = ""
    check: str = "all"


def script_of(prompt: Sequence[int], end_id: int = END_ID) -> list[int]:
    """What the model will say: the last user message (the whole prompt if there is none), then the end."""
    start, end = 0, len(prompt)
    if end_id != END_ID:
        return [*prompt, end_id]
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


def _digests(before: np.uint64, tokens: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """digest[i] = digest[i - 1] * M + tokens[i] + 1 modulo 2^64, without a loop.

    M is odd and has an inverse, so digest[i] / M^(i + 1) = before + the sum of (tokens[j] + 1) / M^(j + 1).
    """
    with np.errstate(over="ignore"):
        powers = np.multiply.accumulate(np.full(len(tokens), _MULTIPLIER, np.uint64))
        inverses = np.multiply.accumulate(np.full(len(tokens), _INVERSE, np.uint64))
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * inverses
        return powers * (before + np.add.accumulate(terms))


def _broken(past: Records, begin: int, slice_: Slice) -> str | None:
    """Where the records of earlier tokens, from `begin` on, are not what was written, in words."""
    if not len(past):
        return None
    tokens, digests = past["token"].astype(np.uint64), past["digest"]
    wrong = past["mark"] != np.uint32(_MARK + begin) + np.arange(len(past), dtype=np.uint32)
    if not begin:
        before = np.concatenate([np.zeros(1, np.uint64), digests[:-1]])
        with np.errstate(over="ignore"):
            wrong |= digests != before * _MULTIPLIER + tokens + np.uint64(1)
    if slice_.meta is not None:
        prompt = np.asarray(slice_.meta.prompt[begin : begin + len(past)], dtype=np.uint64)
        wrong[: len(prompt)] |= tokens[: len(prompt)] != prompt
    if not wrong.any():
        return None
    position = begin + int(wrong.argmax())
    return f"the page of position {position} does not hold what was written there"


def script_options(options: str) -> ScriptOptions:
    """What stands behind `script:`. Raises EngineError."""
    found: dict[str, str] = {}
    for part in filter(None, options.split(",")):
        name, _, value = part.partition("=")
        if name not in ("text", "check") or not value or (name == "check" and value not in ("all", "tail")):
            raise EngineError(f"script:{options}: options are text=PATH and check=all|tail")
        found[name] = value
    return ScriptOptions(**found)


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


def _seconds(metadata: Mapping[str, str], key: str) -> float:
    """Milliseconds in the metadata, as seconds; 0 without."""
    text = metadata.get(key, "")
    try:
        return min(max(0.0, float(text or 0)), 60_000.0) / 1e3
    except ValueError:
        return 0.0


class _BadMetadata(Exception):
    """A script_* value that cannot be followed."""
