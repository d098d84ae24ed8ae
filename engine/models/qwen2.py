"""Qwen 2 and 2.5: as Llama, with a bias on q, k and v, and rope over the two halves of a head.

Qwen2: https://arxiv.org/abs/2407.10671.
"""

import math

from engine.models.hyperparameters import Hyperparameters
from engine.models.parts import finished, linear, qkv, rope_setting, sizes, swiglu, turned
from engine.program import Builder, Program


def build(b: Builder, h: Hyperparameters, logits: bool) -> Program:
    s = sizes(b, h)
    rope = rope_setting(b, h, s.dim, style="halves")
    h.refuse("attention.sliding_window", unless=0)

    x = b.embed("embed", "token_embd.weight", width=s.hidden, vocab=s.vocab)
    for i in range(s.layers):
        name, blk = f"layers.{i}", f"blk.{i}"
        y = b.norm(f"{name}.attn_norm", x, f"{blk}.attn_norm.weight", epsilon=s.epsilon)
        q, k, v = qkv(b, name, blk, y, s)
        q, k = turned(b, name, q, k, s, rope)
        cache = b.write_kv(f"{name}.kv", k, v, layer=i, heads=s.kv_heads)
        y = b.attend(f"{name}.attend", q, cache, q_heads=s.heads, scale=1 / math.sqrt(s.dim))
        y = linear(b, f"{name}.o", y, f"{blk}.attn_output", s.hidden)
        x = b.add(f"{name}.attn_add", x, y)

        y = b.norm(f"{name}.ffn_norm", x, f"{blk}.ffn_norm.weight", epsilon=s.epsilon)
        x = b.add(f"{name}.ffn_add", x, swiglu(b, name, blk, y, s))
    return finished(b, x, s, logits=logits, rope=rope.text)
