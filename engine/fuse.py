"""Passes that any architecture gets for free: functions from Program to Program that compute the same.

    one_product      products of the same input become one, over stacked weights, whose columns are split
    one_rope         neighbouring columns that are rotated alike are rotated at once
    without_unused   what nobody reads is dropped

Knows nothing of architectures or executors.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.program import Linear, Operation, Program, Rope, Split, Tensor, Weight, inputs, outputs


def fuse(program: Program) -> Program:
    return one_rope(one_product(program))


def one_product(program: Program) -> Program:
    """q, k and v become one product, and so do gate and up: fewer, larger products run faster."""
    fused: list[Operation] = []
    pending = list(program.operations)
    while pending:
        first = pending.pop(0)
        if not isinstance(first, Linear):
            fused.append(first)
            continue
        run = [first]
        while pending and isinstance(follower := pending[0], Linear) and _alike(first, follower):
            run.append(follower)
            pending.pop(0)
        fused.extend(run if len(run) == 1 else _stacked(run))
    return replace(program, operations=tuple(fused))


def _alike(first: Linear, other: Linear) -> bool:
    return other.x == first.x and (other.bias is None) == (first.bias is None)


def _stacked(run: Sequence[Linear]) -> tuple[Linear, Split]:
    name = "+".join(linear.name for linear in run)
    x = run[0].x
    out = Tensor(name, x.lines, sum(linear.out.width for linear in run))
    weight = _stack([linear.weight for linear in run])
    biases = [linear.bias for linear in run if linear.bias is not None]
    bias = None
    if biases:
        names = tuple(part for vector in biases for part in vector.names)
        bias = Weight(names, 1, sum(vector.columns for vector in biases))
    return (
        Linear(name, x, weight, bias, out),
        Split(f"{name}.split", out, tuple(linear.out for linear in run)),
    )


def _stack(weights: Sequence[Weight]) -> Weight:
    names = tuple(part for weight in weights for part in weight.names)
    return Weight(names, sum(weight.rows for weight in weights), weights[0].columns)


def one_rope(program: Program) -> Program:
    """Split → rope(q), rope(k) becomes one rope over both, where they lie side by side."""
    fused: list[Operation] = []
    pending = list(program.operations)
    while pending:
        match pending[:3]:
            case [Split() as split, Rope() as first, Rope() as second] if _side_by_side(split, first, second):
                name = f"{first.name}+{second.name}"
                before = Tensor(f"{name}.in", first.x.lines, first.x.width + second.x.width)
                after = Tensor(name, before.lines, before.width)
                fused.append(replace(split, outs=(before, *split.outs[2:])))
                fused.append(replace(first, name=name, x=before, heads=first.heads + second.heads, out=after))
                fused.append(Split(f"{name}.split", after, (first.out, second.out)))
                del pending[:3]
            case _:
                fused.append(pending.pop(0))
    return replace(program, operations=tuple(fused))


def _side_by_side(split: Split, first: Rope, second: Rope) -> bool:
    same_turn = (first.style, first.turns, first.divisors) == (second.style, second.turns, second.divisors)
    same_size = first.x.width // first.heads == second.x.width // second.heads
    return same_turn and same_size and split.outs[:2] == (first.x, second.x)


def without_unused(program: Program) -> Program:
    """Drops what nobody reads: a program without logits ends with the last layer's keys and values."""
    wanted = set() if program.result is None else {program.result}
    kept: list[Operation] = []
    for operation in reversed(program.operations):
        made = outputs(operation)
        if made and not wanted.intersection(made):
            continue
        wanted.update(inputs(operation))
        kept.append(operation)
    return replace(program, operations=tuple(reversed(kept)))
