"""Llama: norm, qkv, rope, attend, gate, up, down. Also SmolLM2 and every other model with this name in GGUF.

Llama 2: https://arxiv.org/abs/2307.09288. In GGUF the rows of q and k are permuted so that rope turns
neighbouring numbers ("interleaved").
"""

import math

from engine.models.hyperparameters import Hyperparameters
from engine.program import Builder, Program


def build(b: Builder, h: Hyperparameters, logits: bool) -> Program:
    hidden = h.count("embedding_length")
    layers = h.count("block_count", most=1024)
    inner = h.count("feed_forward_length")
    heads = h.count("attention.head_count")
    kv_heads = h.count("attention.head_count_kv", heads)
    dim = h.count("attention.key_length", max(1, hidden // heads))
    epsilon = h.number("attention.layer_norm_rms_epsilon")
    vocab = b.rows("token_embd.weight")
    base = h.number("rope.freq_base", 10000.0)
    scale = rope_scale(h)
    factors = "rope_freqs.weight" if b.has("rope_freqs.weight") else None
    h.refuse("expert_count", unless=0)
    h.refuse("attention.value_length", unless=dim)
    h.refuse("rope.dimension_count", unless=dim)

    x = b.embed("embed", "token_embd.weight", width=hidden, vocab=vocab)
    for i in range(layers):
        name, blk = f"layers.{i}", f"blk.{i}"
        bias = f"{blk}.attn_{{}}.bias" if b.has(f"{blk}.attn_q.bias") else None

        y = b.norm(f"{name}.attn_norm", x, f"{blk}.attn_norm.weight", epsilon=epsilon)
        q, k, v = (
            b.linear(
                f"{name}.{part}",
                y,
                f"{blk}.attn_{part}.weight",
                width=count * dim,
                bias=bias and bias.format(part),
            )
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = (
            b.rope(
                f"{name}.rope_{part}",
                t,
                heads=count,
                style="interleaved",
                base=base,
                factors=factors,
                scale=scale,
            )
            for part, t, count in (("q", q, heads), ("k", k, kv_heads))
        )
        cache = b.write_kv(f"{name}.kv", k, v, layer=i, heads=kv_heads)
        y = b.attend(f"{name}.attend", q, cache, q_heads=heads, scale=1 / math.sqrt(dim))
        y = b.linear(f"{name}.o", y, f"{blk}.attn_output.weight", width=hidden)
        x = b.add(f"{name}.attn_add", x, y)

        y = b.norm(f"{name}.ffn_norm", x, f"{blk}.ffn_norm.weight", epsilon=epsilon)
        gate = b.linear(f"{name}.gate", y, f"{blk}.ffn_gate.weight", width=inner)
        up = b.linear(f"{name}.up", y, f"{blk}.ffn_up.weight", width=inner)
        y = b.gate(f"{name}.silu", gate, up, kind="silu")
        y = b.linear(f"{name}.down", y, f"{blk}.ffn_down.weight", width=hidden)
        x = b.add(f"{name}.ffn_add", x, y)

    result = None
    if logits:
        x = b.pick_logit_rows("pick", x)
        x = b.norm("output_norm", x, "output_norm.weight", epsilon=epsilon)
        tied = not b.has("output.weight")
        result = b.linear("output", x, "token_embd.weight" if tied else "output.weight", width=vocab)
    rope = f"interleaved base={base!r} dim={dim} scale={scale!r} factors={factors is not None}"
    return b.program(result, rope=rope, hidden_size=hidden, vocab_size=vocab)


def rope_scale(h: Hyperparameters) -> float:
    """What positions are multiplied by: linear scaling only."""
    kind = h.text("rope.scaling.type", "none")
    if kind == "linear":
        return 1.0 / h.number("rope.scaling.factor")
    if kind != "none":
        h.refuse("rope.scaling.type")
    return 1.0
