"""The `reference` executor: interprets a program with plain torch in float32; the truth for all others.

Operations are bound to their weights once, at load, as closures over named values; a step runs them in
order over all rows of the batch, layer by layer, so that a layer's weights stay in the cache. Which batch,
which pages and which positions is the business of `engine.batch`; how to compute, of `kernels.reference`.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import StepPlan, plan_step
from engine.describe import describe
from engine.errors import EngineError
from engine.executor import (
    Arena,
    Slice,
    SliceMeta,
    StepResult,
    check_arena,
    sort_out,
)
from engine.fuse import fuse, without_unused
from engine.models import build
from engine.paging import page_geometry
from engine.pool import PagePool
from engine.products import BoundProduct, ProductShelf
from engine.program import (
    ROWS,
    Add,
    Attend,
    Embed,
    Gate,
    Linear,
    Operation,
    PickLogitRows,
    Program,
    RmsNorm,
    Rope,
    SoftCap,
    Split,
    WriteKv,
    inputs,
    outputs,
)
from engine.rope import rope_table
from engine.weights.source import ModelSource, WeightSource
from kernels.reference import attention, elementwise
from kernels.reference.invariance import Evidence, attention_sizes, elementwise_problem

Values = dict[str, Tensor]
Bound = Callable[[Values, StepPlan], None]


class ReferenceExecutor:
    """Implements `engine.executor.Executor`. Not for use from two threads at a time."""

    def __init__(
        self, model: ModelSource, *, threads: int, page_tokens: int, kv_dtype: str, logits: bool = True
    ) -> None:
        self._threads = threads
        self._settled = threading.local()
        self._settle_thread()
        program, hyper = build(model, logits=logits)
        whole = fuse(program)
        self._program = program = without_unused(whole)
        self._weights = model.weights
        layout = page_geometry(program.caches, page_tokens=page_tokens, dtype=kv_dtype)
        self._context = hyper.context_length
        self._padding = model.padding_ids
        evidence = Evidence()
        with torch.inference_mode():
            _check_elementwise(whole, evidence)
            self._attention = {
                (shared, dim): attention_sizes(shared, dim, evidence)
                for shared, dim in sorted(
                    {
                        (op.q_heads // op.cache.heads, op.cache.dim)
                        for op in whole.operations
                        if isinstance(op, Attend)
                    }
                )
            }
            shelf = ProductShelf(model.weights, evidence)
            self._ropes: dict[str, tuple[Tensor, Tensor]] = {}
            for op in whole.operations:
                # Also what this worker leaves out: whether its pages equal another's does not depend on that.
                if isinstance(op, Linear) and op.x.lines == ROWS:
                    shelf.examine(op)
            self._bound = [self._bind_operation(op, shelf) for op in program.operations]
        for op in program.operations:
            if isinstance(op, Embed):  # read row by row later, so nothing has looked at all of it yet
                model.weights.check(op.table.names[0])
        self._last_use = _last_uses(program)
        self._pool: PagePool | None = None
        self.info = describe(
            model,
            program,
            layout,
            kv_dtype=kv_dtype,
            context_length=self._context,
            numerics_id=f"reference/1 torch={torch.__version__} bits={evidence.hexdigest()}",
            weights_digest=model.weights.digest(),
            weights_bytes=shelf.nbytes,
        )

    def bind(self, arena: Arena, pages: int, page_bytes: int) -> None:
        view = check_arena(arena, pages, page_bytes, self.info.layout)
        self._pool = PagePool(view, pages, page_bytes, self.info.layout)

    def draft(self, meta: SliceMeta) -> list[int]:
        return []

    def step(self, batch: Sequence[Slice]) -> list[StepResult]:
        if self._pool is None:
            raise EngineError("step before bind: there is no pool to work in")
        self._settle_thread()
        has_logits = self._program.result is not None
        results, good = sort_out(batch, self.info, self._pool.pages, has_logits=has_logits)
        if not good:
            return results
        with torch.inference_mode():
            plan = plan_step([slice_ for _, slice_ in good], self._pool, self._sizes)
            logits = self._run(plan)
        row = 0
        for index, slice_ in good:
            if slice_.logits and logits is not None:
                results[index] = logits[row : row + slice_.logits].numpy()
                row += slice_.logits
        return results

    def _settle_thread(self) -> None:
        """OpenMP counts threads per calling thread, and what was verified was verified for this count."""
        if torch.get_num_threads() != self._threads or not getattr(self._settled, "done", False):
            torch.set_num_threads(self._threads)
            self._settled.done = True

    def _sizes(self, shared: int, dim: int) -> tuple[int, ...]:
        return self._attention[shared, dim][0]

    def _run(self, plan: StepPlan) -> Tensor | None:
        values: Values = {}
        for bound, done in zip(self._bound, self._last_use, strict=True):
            bound(values, plan)
            for name in done:
                del values[name]
        if self._program.result is None or not plan.logit_rows:
            return None
        logits = values[self._program.result.name]
        first, end = self._padding
        if end > first:
            # Finite, so that it counts as a number, and far below any other logit.
            logits[:, first:end] = -1e30
        return logits

    def _bind_operation(self, op: Operation, shelf: ProductShelf) -> Bound:
        match op:
            case Embed():
                return _bind_embed(op, self._weights)
            case RmsNorm():
                return _bind_norm(op, torch.from_numpy(self._weights.load(op.weight.names[0])))
            case Linear():
                return _bind_linear(op, shelf.product(op))
            case Split():
                return _bind_split(op)
            case Rope():
                return _bind_rope(op, self._rope_table(op))
            case WriteKv():
                return self._bind_write(op)
            case Attend():
                return self._bind_attend(op)
            case Gate():
                return _bind_gate(op)
            case Add():
                return _bind_add(op)
            case PickLogitRows():
                return _bind_pick(op)
            case SoftCap():
                return _bind_cap(op)

    def _rope_table(self, op: Rope) -> tuple[Tensor, Tensor]:
        key = f"{op.turns} {op.divisors}"
        if key not in self._ropes:
            divisors = None if op.divisors is None else self._weights.load(op.divisors.names[0])
            cosines, sines = rope_table(self._context, op.turns, divisors)
            self._ropes[key] = torch.from_numpy(cosines), torch.from_numpy(sines)
        return self._ropes[key]

    def _bind_write(self, op: WriteKv) -> Bound:
        layer, heads, dim, k, v = op.cache.layer, op.cache.heads, op.cache.dim, op.k.name, op.v.name

        def run(values: Values, plan: StepPlan) -> None:
            plan.pool.write(layer, "k", plan.write_pages, plan.write_slots, values[k].view(-1, heads, dim))
            plan.pool.write(layer, "v", plan.write_pages, plan.write_slots, values[v].view(-1, heads, dim))

        return run

    def _bind_attend(self, op: Attend) -> Bound:
        cache, heads, dim = op.cache, op.q_heads, op.cache.dim
        shared = heads // cache.heads
        _, bmm = self._attention[shared, dim]

        def run(values: Values, plan: StepPlan) -> None:
            values[op.out.name] = attention.attend(
                values[op.q.name].view(-1, heads, dim),
                plan.pool.runs(cache.layer, "k"),
                plan.pool.runs(cache.layer, "v"),
                plan.groups(cache.heads, dim, shared, op.window),
                kv_heads=cache.heads,
                scale=op.scale,
                cap=op.cap,
                bmm=bmm,
            )

        return run


def _check_elementwise(program: Program, evidence: Evidence) -> None:
    widths = {op.weight.columns for op in program.operations if isinstance(op, RmsNorm)}
    problem = elementwise_problem(widths, evidence)
    if problem is not None:
        raise EngineError(f"the reference executor cannot keep its promise with this torch: {problem}")


def _bind_embed(op: Embed, weights: WeightSource) -> Bound:
    table, out, scale = op.table.names[0], op.out.name, op.scale

    def run(values: Values, plan: StepPlan) -> None:
        x = torch.from_numpy(weights.rows(table, plan.tokens))
        values[out] = x if scale == 1.0 else x * scale

    return run


def _bind_norm(op: RmsNorm, weight: Tensor) -> Bound:
    x, out, epsilon, size = op.x.name, op.out.name, op.epsilon, op.weight.columns
    width = op.x.width

    def run(values: Values, plan: StepPlan) -> None:
        lines = values[x]
        if size == width:
            values[out] = elementwise.rms_norm(lines, weight, epsilon)
        else:
            grouped = lines.reshape(-1, size)
            values[out] = elementwise.rms_norm(grouped, weight, epsilon).view(len(lines), width)

    return run


def _bind_linear(op: Linear, product: BoundProduct) -> Bound:
    x, out = op.x.name, op.out.name

    def run(values: Values, plan: StepPlan) -> None:
        values[out] = product(values[x])

    return run


def _bind_split(op: Split) -> Bound:
    x = op.x.name
    cuts = []
    start = 0
    for part in op.outs:
        cuts.append((part.name, start, part.width))
        start += part.width

    def run(values: Values, plan: StepPlan) -> None:
        whole = values[x]
        for name, first, width in cuts:
            values[name] = whole.narrow(1, first, width)

    return run


def _bind_rope(op: Rope, table: tuple[Tensor, Tensor]) -> Bound:
    x, out, heads, width = op.x.name, op.out.name, op.heads, op.x.width
    interleaved = op.style == "interleaved"

    def run(values: Values, plan: StepPlan) -> None:
        cos, sin = plan.turns(table)
        lines = values[x].view(-1, heads, width // heads)
        values[out] = elementwise.rope(lines, cos, sin, interleaved=interleaved).view(-1, width)

    return run


def _bind_gate(op: Gate) -> Bound:
    gate, up, out = op.gate.name, op.up.name, op.out.name
    gated = elementwise.silu_gate if op.kind == "silu" else elementwise.gelu_gate

    def run(values: Values, plan: StepPlan) -> None:
        values[out] = gated(values[gate], values[up])

    return run


def _bind_add(op: Add) -> Bound:
    x, y, out = op.x.name, op.y.name, op.out.name

    def run(values: Values, plan: StepPlan) -> None:
        values[out] = values[x] + values[y]

    return run


def _bind_pick(op: PickLogitRows) -> Bound:
    x, out = op.x.name, op.out.name

    def run(values: Values, plan: StepPlan) -> None:
        values[out] = values[x].index_select(0, plan.picked)

    return run


def _bind_cap(op: SoftCap) -> Bound:
    x, out, cap = op.x.name, op.out.name, op.cap

    def run(values: Values, plan: StepPlan) -> None:
        values[out] = elementwise.soft_cap(values[x], cap)

    return run


def _last_uses(program: Program) -> list[list[str]]:
    """For each operation, the values that nobody needs after it: their memory can be used again."""
    last: dict[str, int] = {}
    for index, operation in enumerate(program.operations):
        for value in (*inputs(operation), *outputs(operation)):
            last[value.name] = index
    done: list[list[str]] = [[] for _ in program.operations]
    for name, index in last.items():
        if program.result is None or name != program.result.name:
            done[index].append(name)
    return done
