"""How far a model's answers are from those of a float32 oracle: FILE is JSON lines.

Records of kind "teacher" hold token ids and, for some positions, the five likeliest next tokens with their
log-probabilities; "greedy" ones a continuation with the margin by which each token led. Other kinds are
passed over. Position 0 (and a record's `sink`) is judged apart: with quantised activations nothing else
there is like the rest.

  kl_mean, kl_p99           KL(oracle || model) in nats. From a file it is taken over the tokens that the file
                            names and all others as one, which is at most the true value; with --exact over
                            the whole vocabulary, against this project's own float32 executor (needs torch)
  top1_agreement_pct        positions with the same likeliest token
  largest_difference_nats   of the log-probabilities of the oracle's top 5
  greedy_agreement_pct      steps of the continuations where the likeliest token is the oracle's
"""

import argparse
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.command import BenchError, Row
from bench.loaded import add_model_arguments, load_model
from engine import EngineError, Executor, Slice

Doubles = NDArray[np.float64]
# Logits of so many rows at a time: 128 of a large vocabulary are 134 MB.
ROWS = 128
KNOWN_MODELS = ("smollm2", "gemma3-270m", "qwen2.5-coder-1.5b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="such as logits_smollm2-135m.jsonl")
    add_model_arguments(parser, model=None)
    parser.add_argument("--exact", action="store_true", help="KL over the whole vocabulary (slow)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only these records")


def run(arguments: argparse.Namespace) -> Row:
    records = read_records(arguments.file)
    if arguments.only is not None:
        records = [record for record in records if record["name"] in arguments.only]
    if not records:
        raise BenchError(f"{arguments.file}: no record to judge by")
    if arguments.model is None:
        arguments.model = _model_of(arguments.file)
    model = load_model(arguments).executor
    reference = load_model(arguments, executor="reference").executor if arguments.exact else None
    judge = _Judge(model, reference)
    try:
        for record in records:
            judge.add(record)
    except EngineError as error:
        raise BenchError(str(error)) from error
    info = model.info
    return {
        "model": info.name,
        "numerics_id": info.numerics_id,
        "kv_dtype": info.kv_dtype,
        "kl_kind": "whole vocabulary" if reference else "named tokens and the rest",
        **judge.row(),
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """Teacher and greedy records. Raises BenchError naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {error}") from error
    needed = {
        "teacher": ("ids", "positions", "top_ids", "top_lps"),
        "greedy": ("prompt_ids", "ids", "margin"),
    }
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            missing = [key for key in ("name", *needed.get(record["kind"], ())) if key not in record]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise BenchError(f"{path}, line {number}: no record of an oracle ({error})") from error
        if missing:
            raise BenchError(f"{path}, line {number}: {', '.join(missing)} is missing")
        if record["kind"] in needed and record["ids"]:
            records.append(record)
    return records


def _model_of(path: Path) -> str:
    for name in KNOWN_MODELS:
        if name in path.name:
            return f"pkg:{name}"
    raise BenchError(f"{path}: say with --model whose answers these are")


@dataclass(slots=True)
class _Found:
    """Of each position: KL, whether the top token is the same, and differences of log-probabilities."""

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    top5: list[float] = field(default_factory=list)


class _Judge:
    def __init__(self, model: Executor, reference: Executor | None) -> None:
        self._model = model
        self._reference = reference
        self._found, self._apart = _Found(), _Found()
        self._steps: list[bool] = []
        self._flip_margin = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "greedy":
            self._greedy(record)
        else:
            self._teacher(record)

    def row(self) -> dict[str, object]:
        found, apart = self._found, self._apart
        row: dict[str, object] = {"positions": len(found.kl)}
        if found.kl:
            row |= {
                "kl_mean": float(np.mean(found.kl)),
                "kl_p99": float(np.percentile(found.kl, 99)),
                "kl_max": max(found.kl),
                "top1_agreement_pct": 100 * float(np.mean(found.same)),
                "largest_difference_nats": max(found.top5),
                "top1_difference_mean_nats": float(np.mean(found.top1)),
                "top1_difference_p99_nats": float(np.percentile(found.top1, 99)),
                "top1_difference_max_nats": max(found.top1),
            }
        if apart.kl:
            row |= {
                "apart_positions": len(apart.kl),
                "apart_kl_mean": float(np.mean(apart.kl)),
                "apart_kl_max": max(apart.kl),
                "apart_top1_agreement_pct": 100 * float(np.mean(apart.same)),
                "apart_largest_difference_nats": max(apart.top5),
            }
        if self._steps:
            row |= {
                "greedy_steps": len(self._steps),
                "greedy_agreement_pct": 100 * float(np.mean(self._steps)),
                "greedy_flip_margin_max_nats": self._flip_margin,
            }
        return row

    def _teacher(self, record: Mapping[str, Any]) -> None:
        ids, positions = record["ids"], record["positions"]
        ours = _log_probabilities(self._model, ids, positions)
        theirs = None if self._reference is None else _log_probabilities(self._reference, ids, positions)
        sinks = {0, record.get("sink", 0)}
        for index, position in enumerate(positions):
            found = self._apart if position in sinks else self._found
            named = dict(zip(record["top_ids"][index], record["top_lps"][index], strict=True))
            tokens, wanted = list(named), np.array(list(named.values()))
            off = np.abs(ours[index][tokens] - wanted)
            if theirs is None:
                next_lps = record.get("next_lp")
                if next_lps is not None and next_lps[index] is not None:
                    named.setdefault(ids[position + 1], next_lps[index])
                kl = _coarse_kl(np.array(list(named.values())), ours[index][list(named)])
            else:
                kl = float(np.sum(np.exp(theirs[index]) * (theirs[index] - ours[index])))
            found.kl.append(kl)
            found.same.append(int(ours[index].argmax()) == tokens[0])
            found.top1.append(float(off[0]))
            found.top5.append(float(off.max()))

    def _greedy(self, record: Mapping[str, Any]) -> None:
        prompt, ids = record["prompt_ids"], record["ids"]
        wanted = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        chosen = _log_probabilities(self._model, [*prompt, *ids[:-1]], wanted).argmax(1)
        for token, right, margin in zip(chosen.tolist(), ids, record["margin"], strict=True):
            self._steps.append(token == right)
            if token != right:
                self._flip_margin = max(self._flip_margin, float(margin))


def _log_probabilities(model: Executor, ids: Sequence[int], positions: Sequence[int]) -> Doubles:
    """Of the tokens after each of these positions, all tokens before given. [positions, vocabulary]"""
    layout = model.info.layout
    pages = range(layout.pages_for(len(ids)))
    arena = mmap.mmap(-1, len(pages) * layout.page_bytes)
    model.bind(arena, len(pages), layout.page_bytes)
    found: list[Doubles] = []
    wanted = np.asarray(positions)
    for start in range(0, len(ids), ROWS):
        part = ids[start : start + ROWS]
        logits = model.step([Slice(part, start, pages, len(part))])[0]
        if not isinstance(logits, np.ndarray):
            raise BenchError(f"the model refuses tokens of the file: {logits}")
        inside = wanted[(wanted >= start) & (wanted < start + len(part))] - start
        rows = logits[inside].astype(np.float64)
        rows -= rows.max(1, keepdims=True)
        found.append(rows - np.log(np.exp(rows).sum(1, keepdims=True)))
    return np.concatenate(found)


def _coarse_kl(wanted: Doubles, ours: Doubles) -> float:
    """Over the named tokens and everything else as one."""
    tiny = 1e-12
    rest_wanted = max(1.0 - float(np.exp(wanted).sum()), tiny)
    rest_ours = max(1.0 - float(np.exp(ours).sum()), tiny)
    named = float(np.sum(np.exp(wanted) * (wanted - ours)))
    # The file's five decimals can make it a hair negative.
    return max(named + rest_wanted * float(np.log(rest_wanted / rest_ours)), 0.0)
