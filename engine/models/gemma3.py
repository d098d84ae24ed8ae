"""Gemma 3: norms before and after each half of a layer, normalised heads, a window for five layers of six.

Gemma 3: https://arxiv.org/abs/2503.19786. The layers with a window turn by a base of their
own (10,000), which is never scaled. GGUF files name neither that base nor the pattern: every sixth layer
sees everything. They store the weights of norms with the 1 added that the published ones leave out.
"""

import math

from engine.models.hyperparameters import Hyperparameters
from engine.models.parts import (
    RopeSetting,
    cap,
    finished,
    linear,
    normed_heads,
    qkv,
    rope_setting,
    sizes,
    turned,
)
from engine.program import Builder, Program
from engine.rope import Turns, describe

_LAYERS_OF_27B = 62


def build(b: Builder, h: Hyperparameters, logits: bool) -> Program:
    s = sizes(b, h)
    wide = rope_setting(b, h, s.dim, style="halves")
    near = RopeSetting(Turns(s.dim, h.number("rope.freq_base_swa", 10000.0)), None, wide.style)
    window = h.count("attention.sliding_window")
    period = h.count("attention.sliding_window_pattern", 6)
    # The largest model alone divides by what it has per query head instead of by the size of its heads.
    shared_out = s.hidden / s.heads if s.layers == _LAYERS_OF_27B else s.dim
    scale = h.number("attention.scale", 1 / math.sqrt(shared_out))
    attention_cap = cap(h, "attn_logit_softcapping")

    x = b.embed("embed", "token_embd.weight", width=s.hidden, vocab=s.vocab, scale=math.sqrt(s.hidden))
    for i in range(s.layers):
        name, blk = f"layers.{i}", f"blk.{i}"
        is_wide = (i + 1) % period == 0

        y = b.norm(f"{name}.attn_norm", x, f"{blk}.attn_norm.weight", epsilon=s.epsilon)
        q, k, v = qkv(b, name, blk, y, s)
        q, k = normed_heads(b, name, blk, q, k, s)
        q, k = turned(b, name, q, k, s, wide if is_wide else near)
        cache = b.write_kv(f"{name}.kv", k, v, layer=i, heads=s.kv_heads)
        y = b.attend(
            f"{name}.attend",
            q,
            cache,
            q_heads=s.heads,
            scale=scale,
            window=0 if is_wide else window,
            cap=attention_cap,
        )
        y = linear(b, f"{name}.o", y, f"{blk}.attn_output", s.hidden)
        y = b.norm(f"{name}.attn_after", y, f"{blk}.post_attention_norm.weight", epsilon=s.epsilon)
        x = b.add(f"{name}.attn_add", x, y)

        y = b.norm(f"{name}.ffn_norm", x, f"{blk}.ffn_norm.weight", epsilon=s.epsilon)
        gate = linear(b, f"{name}.gate", y, f"{blk}.ffn_gate", s.inner)
        up = linear(b, f"{name}.up", y, f"{blk}.ffn_up", s.inner)
        y = b.gate(f"{name}.gelu", gate, up, kind="gelu")
        y = linear(b, f"{name}.down", y, f"{blk}.ffn_down", s.hidden)
        y = b.norm(f"{name}.ffn_after", y, f"{blk}.post_ffw_norm.weight", epsilon=s.epsilon)
        x = b.add(f"{name}.ffn_add", x, y)
    rope = describe([wide.turns, near.turns], wide.divisors is not None, wide.style)
    return finished(b, x, s, logits=logits, rope=rope, soft_cap=cap(h, "final_logit_softcapping"))
