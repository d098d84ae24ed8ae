"""Typed operations become the core's: buffers, quantised rows, products with what follows them at their end.

    q, k, v            one product where their weights have one form; rope turns them in place
    gate, up, silu     one product whose outputs stand in pairs
    product, add       the product adds onto the residual in place
    norm → products    rows are quantised once for all products that read them

Knows nothing of steps.
"""

from collections import Counter
from collections.abc import Sequence

from engine.cpu.pack import RopeKey
from engine.cpu.shelf import Shelving
from engine.errors import ProgramError
from engine.paging import LayerCache, PageGeometry
from engine.program import (
    LOGIT_ROWS,
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
    Tensor,
    WriteKv,
    inputs,
)
from kernels.cpu import CoreEngine, View
from kernels.cpu.interface import RESULT


class Lowering:
    """Adds one program to an engine."""

    def __init__(
        self, engine: CoreEngine, shelf: Shelving, program: Program, layout: PageGeometry, context: int
    ) -> None:
        self._engine = engine
        self._shelf = shelf
        self._program = program
        self._layout = layout
        self._context = context
        self._pending = list(program.operations)
        self._uses = Counter(x.name for op in program.operations for x in inputs(op))
        self._last_read = {x.name: i for i, op in enumerate(program.operations) for x in inputs(op)}
        self._views: dict[str, View] = {}
        self._quantised: dict[str, View] = {}
        self.logit_cap = 0.0
        last = program.operations[-1]
        self._result = None if program.result is None else program.result.name
        self._capped = last.x.name if isinstance(last, SoftCap) else None

    def run(self) -> None:
        """Raises ProgramError, naming the operation, where the core refuses it."""
        while self._pending:
            op = self._pending[0]
            try:
                self._next()
            except ValueError as error:
                raise ProgramError(f"{op.name}: {error}") from error

    def _next(self) -> None:
        op = self._pending.pop(0)
        match op:
            case Linear():
                self._linears(op)
            case Embed():
                out = self._new(op.out)
                self._engine.embed(self._shelf.weight([op.table]).index, op.scale, out)
            case RmsNorm():
                vector = self._shelf.vector(op.weight.names)
                x, out = self._views[op.x.name], self._new(op.out)
                self._engine.norm(x, vector, op.epsilon, op.weight.columns, out, _picked(op.x))
            case Rope():
                self._rope(op)
            case WriteKv():
                k, v = self._views[op.k.name], self._views[op.v.name]
                self._engine.write_kv(k, v, op.cache.heads, op.cache.dim, *self._planes(op.cache))
            case Attend():
                self._attend(op)
            case Gate():
                gate, up = self._views[op.gate.name], self._views[op.up.name]
                self._engine.gate(op.kind, gate, up, self._new(op.out), _picked(op.out))
            case Add():
                x, y = self._views[op.x.name], self._views[op.y.name]
                self._engine.add(x, y, self._new(op.out), _picked(op.out))
            case SoftCap():
                if op.out.name != self._result or op.x.name != self._capped:
                    raise ProgramError(f"{op.name}: only logits can be capped")
                self.logit_cap = op.cap
            case PickLogitRows():
                x = self._views[op.x.name]
                self._engine.pick(x, self._new(op.out))
            case Split():
                buffer, column, _ = self._views[op.x.name]
                for part in op.outs:
                    self._views[part.name] = (buffer, column, part.width)
                    column += part.width

    def _linears(self, first: Linear) -> None:
        run = [first]
        while self._pending and isinstance(op := self._pending[0], Linear) and op.x == first.x:
            run.append(op)
            self._pending.pop(0)
        follower = self._pending[0] if self._pending else None
        if isinstance(follower, Gate) and self._is_pair(run, follower):
            self._pending.pop(0)
            shelved = self._shelf.weight([op.weight for op in run], paired=True)
            out = self._new(follower.out)
            self._engine.product(
                self._rows(first.x, shelved.quantised),
                shelved.index,
                -1,
                f"{follower.kind}_gate",
                out,
                _picked(first.x),
            )
            return
        if len(run) == 1 and isinstance(follower, Add) and (onto := self._residual(first, follower)):
            self._pending.pop(0)
            self._views[follower.out.name] = self._views[onto.name]
            self._quantised.pop(onto.name, None)
            self._product(run, self._views[onto.name], "add")
            return
        if len(run) == 1 and first.out.name in (self._result, self._capped):
            self._product(run, (RESULT, 0, first.out.width), "store")
            return
        buffer = self._engine.buffer(sum(op.out.width for op in run), _picked(first.x), False)
        column = 0
        for op in run:
            self._views[op.out.name] = (buffer, column, op.out.width)
            column += op.out.width
        for group in self._alike(run):
            start = self._views[group[0].out.name][1]
            self._product(group, (buffer, start, sum(op.out.width for op in group)), "store")

    def _product(self, run: Sequence[Linear], out: View, epilogue: str) -> None:
        shelved = self._shelf.weight([op.weight for op in run])
        biases = [name for op in run if op.bias is not None for name in op.bias.names]
        bias = self._shelf.vector(biases) if biases else -1
        x = run[0].x
        self._engine.product(self._rows(x, shelved.quantised), shelved.index, bias, epilogue, out, _picked(x))

    def _alike(self, run: Sequence[Linear]) -> list[list[Linear]]:
        """Neighbours whose weights can be stacked."""
        groups: list[list[Linear]] = []
        last: object = None
        for op in run:
            form = (self._shelf.form(op.weight), op.bias is None)
            if form == last:
                groups[-1].append(op)
            else:
                groups.append([op])
            last = form
        return groups

    def _is_pair(self, run: Sequence[Linear], gate: Gate) -> bool:
        return (
            [op.out for op in run] == [gate.gate, gate.up]
            and all(op.bias is None and self._uses[op.out.name] == 1 for op in run)
            and run[0].weight.rows % 8 == 0
            and self._shelf.form(run[0].weight) == self._shelf.form(run[1].weight)
        )

    def _residual(self, linear: Linear, add: Add) -> Tensor | None:
        """What the product is added onto, where nobody needs it as it was."""
        if self._uses[linear.out.name] != 1:
            return None
        other = add.x if add.y == linear.out else add.y if add.x == linear.out else None
        if other is None or other.name not in self._views or other == linear.x:
            return None
        done = len(self._program.operations) - len(self._pending)
        return None if self._last_read[other.name] > done else other

    def _rows(self, x: Tensor, quantised: bool) -> View:
        """The lines of x as a product reads them."""
        if not quantised:
            return self._views[x.name]
        if x.name not in self._quantised:
            out: View = (self._engine.buffer(x.width, _picked(x), True), 0, x.width)
            self._engine.quantise(self._views[x.name], out, _picked(x))
            self._quantised[x.name] = out
        return self._quantised[x.name]

    def _rope(self, op: Rope) -> None:
        if self._uses[op.x.name] != 1:
            raise ProgramError(f"{op.name}: {op.x} is read elsewhere too, so it cannot be turned in place")
        dim = op.turns.dim
        table = self._shelf.rope(
            RopeKey(self._context, op.turns, None if op.divisors is None else op.divisors.names[0])
        )
        view = self._views[op.x.name]
        self._engine.rope(view, op.heads, dim, table, op.style == "interleaved")
        self._views[op.out.name] = view

    def _attend(self, op: Attend) -> None:
        q, out = self._views[op.q.name], self._new(op.out)
        shared = op.q_heads // op.cache.heads
        self._engine.attend(
            q, op.cache.heads, shared, op.cache.dim, op.scale, op.window, op.cap, *self._planes(op.cache), out
        )

    def _planes(self, cache: LayerCache) -> tuple[int, int, int]:
        """Offsets of keys, values and their scales in a page; the last is 0 where there are none."""
        k, v = self._layout.plane(cache.layer, "k"), self._layout.plane(cache.layer, "v")
        return k.offset, v.offset, self._layout.plane(cache.layer, "scale").offset if k.dtype == "i8" else 0

    def _new(self, tensor: Tensor) -> View:
        view: View = (self._engine.buffer(tensor.width, _picked(tensor), False), 0, tensor.width)
        self._views[tensor.name] = view
        return view


def _picked(tensor: Tensor) -> bool:
    return tensor.lines == LOGIT_ROWS


def multiply_adds(operations: Sequence[Operation]) -> tuple[int, int]:
    """Of the matrices, per row of a step, and per row that needs logits on top."""
    linears = [op for op in operations if isinstance(op, Linear)]
    sizes = [(op.weight.rows * op.weight.columns, _picked(op.x)) for op in linears]
    return sum(size for size, picked in sizes if not picked), sum(size for size, picked in sizes if picked)
