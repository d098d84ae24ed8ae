"""What several architectures share: the sizes of a transformer, its rope, its projections, its head."""

from dataclasses import dataclass
from typing import cast

from engine.errors import EngineError
from engine.models.hyperparameters import Hyperparameters
from engine.program import Builder, Program, RopeStyle, Tensor
from engine.rope import Turns, describe, longrope_magnitude, yarn_magnitude

KINDS = ("none", "linear", "dynamic", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    epsilon: float
    vocab: int


def sizes(b: Builder, h: Hyperparameters) -> Sizes:
    hidden = h.count("embedding_length")
    heads = h.count("attention.head_count")
    dim = h.count("attention.key_length", max(1, hidden // heads))
    h.refuse("expert_count", unless=0)
    h.refuse("attention.value_length", unless=dim)
    h.refuse("rope.dimension_count", unless=dim)
    return Sizes(
        hidden=hidden,
        layers=h.count("block_count", most=1024),
        inner=h.count("feed_forward_length"),
        heads=heads,
        kv_heads=h.count("attention.head_count_kv", heads),
        dim=dim,
        epsilon=h.number("attention.layer_norm_rms_epsilon"),
        vocab=b.rows("token_embd.weight"),
    )


@dataclass(frozen=True, slots=True)
class RopeSetting:
    """What a layer's rope needs: all of its parameters, and the tensor of divisors if there is one."""

    turns: Turns
    divisors: str | None
    style: RopeStyle

    @property
    def text(self) -> str:
        return describe([self.turns], self.divisors is not None, self.style)


def rope_setting(b: Builder, h: Hyperparameters, dim: int, *, style: RopeStyle) -> RopeSetting:
    """Reads `rope.*`. Raises EngineError for a kind of scaling that is not known."""
    base = h.number("rope.freq_base", 10000.0)
    style = cast(RopeStyle, h.one_of("rope.style", ("interleaved", "halves"), style))
    kind = h.one_of("rope.scaling.type", KINDS, "none")
    divisors = "rope_freqs.weight" if b.has("rope_freqs.weight") else None
    if kind == "none":
        return RopeSetting(Turns(dim, base), divisors, style)
    factor = h.number("rope.scaling.factor", 1.0 if kind == "longrope" else None)
    if kind == "linear":
        return RopeSetting(Turns(dim, base, "linear", factor), divisors, style)
    original = h.count("rope.scaling.original_context_length")
    if kind == "dynamic":
        return RopeSetting(Turns(dim, base, "dynamic", factor, original), divisors, style)
    if kind == "longrope":
        # Keys in pages cannot be turned again when a sequence grows long, so one set serves all of them.
        longer = h.context_length > original
        name = "rope_factors_long.weight" if longer else "rope_factors_short.weight"
        stretch = factor if h.has("rope.scaling.factor") else h.context_length / original
        magnitude = h.number("rope.scaling.attn_factor", longrope_magnitude(stretch, original))
        return RopeSetting(Turns(dim, base, magnitude=magnitude), name, style)
    turns = Turns(
        dim,
        base,
        "yarn",
        factor,
        original,
        beta_fast=h.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=h.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=h.flag("rope.scaling.yarn_truncate", True),
        magnitude=h.number("rope.scaling.attn_factor", yarn_magnitude(factor)),
    )
    return RopeSetting(turns, divisors, style)


def linear(b: Builder, name: str, x: Tensor, stem: str, width: int) -> Tensor:
    """A product, with the bias that the file has or has not."""
    bias = f"{stem}.bias"
    return b.linear(name, x, f"{stem}.weight", width=width, bias=bias if b.has(bias) else None)


def qkv(b: Builder, name: str, blk: str, y: Tensor, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    q = linear(b, f"{name}.q", y, f"{blk}.attn_q", s.heads * s.dim)
    k = linear(b, f"{name}.k", y, f"{blk}.attn_k", s.kv_heads * s.dim)
    v = linear(b, f"{name}.v", y, f"{blk}.attn_v", s.kv_heads * s.dim)
    return q, k, v


def normed_heads(b: Builder, name: str, blk: str, q: Tensor, k: Tensor, s: Sizes) -> tuple[Tensor, Tensor]:
    """Each head of q and k normalised by itself."""
    q = b.norm(f"{name}.q_norm", q, f"{blk}.attn_q_norm.weight", epsilon=s.epsilon, group=s.dim)
    k = b.norm(f"{name}.k_norm", k, f"{blk}.attn_k_norm.weight", epsilon=s.epsilon, group=s.dim)
    return q, k


def turned(b: Builder, name: str, q: Tensor, k: Tensor, s: Sizes, rope: RopeSetting) -> tuple[Tensor, Tensor]:
    def turn(part: str, x: Tensor, heads: int) -> Tensor:
        return b.rope(
            f"{name}.rope_{part}", x, heads=heads, style=rope.style, turns=rope.turns, divisors=rope.divisors
        )

    return turn("q", q, s.heads), turn("k", k, s.kv_heads)


def swiglu(b: Builder, name: str, blk: str, y: Tensor, s: Sizes) -> Tensor:
    """down(silu(gate) * up)"""
    gate = linear(b, f"{name}.gate", y, f"{blk}.ffn_gate", s.inner)
    up = linear(b, f"{name}.up", y, f"{blk}.ffn_up", s.inner)
    y = b.gate(f"{name}.silu", gate, up, kind="silu")
    return linear(b, f"{name}.down", y, f"{blk}.ffn_down", s.hidden)


def finished(b: Builder, x: Tensor, s: Sizes, *, logits: bool, rope: str, soft_cap: float = 0.0) -> Program:
    """The last norm and the output matrix, which is the embedding table where the file has no other."""
    result = None
    if logits:
        x = b.pick_logit_rows("pick", x)
        x = b.norm("output_norm", x, "output_norm.weight", epsilon=s.epsilon)
        tied = not b.has("output.weight")
        result = b.linear("output", x, "token_embd.weight" if tied else "output.weight", width=s.vocab)
        if soft_cap:
            result = b.soft_cap("output_cap", result, cap=soft_cap)
    return b.program(result, rope=rope, hidden_size=s.hidden, vocab_size=s.vocab)


def cap(h: Hyperparameters, key: str) -> float:
    """A soft cap: 0 where the file has none."""
    if not h.has(key):
        return 0.0
    value = h.number(key)
    if value < 1e-3:
        raise EngineError(f"{h.key(key)} is {value}: that leaves nothing")
    return value
