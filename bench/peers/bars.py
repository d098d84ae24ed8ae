"""The bars: which ratio of which two figures is wanted. Knows nothing of how they are measured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """Ours is to be at least `factor` times the best of `peers`, or at most that where less is better."""

    figure: str
    peers: tuple[str, ...]
    factor: float
    less_is_better: bool = False


LLAMA, VLLM, TORCH = "llama.cpp", "vllm", "transformers"
BARS = (
    Bar("smollm2.engine-1t.pp512_tok_s", (LLAMA,), 6),
    Bar("smollm2.engine-2t.pp512_tok_s", (LLAMA,), 6),
    Bar("smollm2.engine-1t.tg64_tok_s", (LLAMA,), 2),
    Bar("gemma3-270m.engine-1t.pp512_tok_s", (LLAMA,), 3),
    Bar("gemma3-270m.engine-1t.tg64_tok_s", (LLAMA,), 1.5),
    Bar("smollm2.depth-1024.tg32_tok_s", (LLAMA,), 3),
    Bar("smollm2.depth-4096.tg32_tok_s", (LLAMA,), 6),
    Bar("smollm2.batch-16.tg_tok_s", (LLAMA,), 5),
    Bar("smollm2.steps.pp512_tok_s", (TORCH,), 5),
    Bar("smollm2.steps.tg64_tok_s", (TORCH,), 5),
    Bar("smollm2.steps.spread_ms", (TORCH,), 1 / 3, less_is_better=True),
    Bar("smollm2.server.out_tok_s", (VLLM,), 2.5),
    Bar("smollm2.server.out_tok_s", (LLAMA,), 5),
    Bar("smollm2.server.ttft_p50_ms", (VLLM, LLAMA), 1, less_is_better=True),
    Bar("smollm2.server.itl_p99_ms", (VLLM, LLAMA), 1 / 5, less_is_better=True),
)


def judged(medians: Mapping[str, object]) -> dict[str, object]:
    """For every bar whose two sides were measured: the ratio that is, the one that is wanted."""
    return dict(_lines(medians))


def _lines(medians: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for bar in BARS:
        ours = medians.get(f"kvmesh.{bar.figure}")
        theirs = [v for peer in bar.peers if isinstance(v := medians.get(f"{peer}.{bar.figure}"), float)]
        if not isinstance(ours, float) or len(theirs) < len(bar.peers) or not min(theirs):
            continue
        best = min(theirs) if bar.less_is_better else max(theirs)
        ratio = ours / best
        met = ratio <= bar.factor if bar.less_is_better else ratio >= bar.factor
        sign = "≤" if bar.less_is_better else "≥"
        verdict = "met" if met else "MISSED"
        yield f"bar.{bar.figure} / {'|'.join(bar.peers)}", f"{ratio:.3g} ({sign} {bar.factor:.3g}: {verdict})"
