"""A model as a typed program: a short list of operations over named tensors.

Shapes and dtypes are checked when the program is built. A missing tensor, a wrong dimension or an
impossible dtype is a ProgramError that names the operation and the tensor, before any request comes.

A value is a matrix with one line per row of the step ("rows"), or per row that needs logits ("logit_rows").
Positions, page tables and ranges belong to the step, not to the program. Knows nothing of weights' values,
executors, or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import ProgramError
from engine.paging import LayerCache
from engine.rope import Turns

ROWS, LOGIT_ROWS = "rows", "logit_rows"
ActivationKind = Literal["silu", "gelu"]
"""Of "gelu" the approximation by tanh, as Gemma has it."""
RopeStyle = Literal["interleaved", "halves"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the program. `lines` says one line per what; `width` numbers per line."""

    name: str
    lines: str
    width: int
    dtype: str = "f32"

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{self.lines}, {self.width}]"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the file, or several matrices stacked along their outputs.

    `rows` outputs x `columns` inputs; a vector has `columns` numbers and `rows` 1.
    """

    names: tuple[str, ...]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Embed:
    """out = table[token ids] * scale"""

    name: str
    table: Weight
    scale: float
    out: Tensor


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x / sqrt(mean(x²) + epsilon) * weight, over each group of `weight.columns` numbers of a line."""

    name: str
    x: Tensor
    weight: Weight
    epsilon: float
    out: Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x · weightᵀ (+ bias)"""

    name: str
    x: Tensor
    weight: Weight
    bias: Weight | None
    out: Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """The columns of x, cut into `outs`."""

    name: str
    x: Tensor
    outs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates each head of x by its row's position. `style` says which numbers of a head are a pair."""

    name: str
    x: Tensor
    heads: int
    style: RopeStyle
    turns: Turns
    divisors: Weight | None
    """What the frequencies are divided by, one number for each pair."""
    out: Tensor


@dataclass(frozen=True, slots=True)
class WriteKv:
    """Keys and values of the new rows go into their pages."""

    name: str
    cache: LayerCache
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Attend:
    """Softmax attention of each row over its own sequence up to itself, read from pages.

    `window` 0 is all of it, otherwise row i sees j with i - j < window. With a `cap` scores become
    cap * tanh(score / cap).
    """

    name: str
    cache: LayerCache
    q: Tensor
    q_heads: int
    scale: float
    window: int
    cap: float
    out: Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """out = activation(gate) * up"""

    name: str
    kind: ActivationKind
    gate: Tensor
    up: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y"""

    name: str
    x: Tensor
    y: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class PickLogitRows:
    """Only the lines that need logits."""

    name: str
    x: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class SoftCap:
    """out = cap * tanh(x / cap)"""

    name: str
    x: Tensor
    cap: float
    out: Tensor


Operation = Embed | RmsNorm | Linear | Split | Rope | WriteKv | Attend | Gate | Add | PickLogitRows | SoftCap


@dataclass(frozen=True, slots=True)
class Program:
    operations: tuple[Operation, ...]
    result: Tensor | None
    """The logits, or None where the program only fills pages."""
    caches: tuple[LayerCache, ...]
    rope: str
    """Canonical text of every rope parameter; part of what makes pages equal."""
    hidden_size: int
    vocab_size: int


def inputs(operation: Operation) -> tuple[Tensor, ...]:
    """The values that the operation reads."""
    match operation:
        case Embed():
            return ()
        case WriteKv():
            return (operation.k, operation.v)
        case Attend():
            return (operation.q,)
        case Gate():
            return (operation.gate, operation.up)
        case Add():
            return (operation.x, operation.y)
        case RmsNorm() | Linear() | Split() | Rope() | PickLogitRows() | SoftCap():
            return (operation.x,)


def outputs(operation: Operation) -> tuple[Tensor, ...]:
    """The values that the operation makes."""
    match operation:
        case WriteKv():
            return ()
        case Split():
            return operation.outs
        case _:
            return (operation.out,)


class Builder:
    """Builds a program, checking each operation as it is added."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._operations: list[Operation] = []
        self._names: set[str] = set()
        self._caches: list[LayerCache] = []
        self._used: set[str] = set()

    @property
    def used(self) -> frozenset[str]:
        """The tensors of the file that some operation reads."""
        return frozenset(self._used)

    def has(self, tensor: str) -> bool:
        return tensor in self._shapes

    def rows(self, tensor: str) -> int:
        """How many rows a matrix has: for sizes that only the file knows, such as the vocabulary."""
        shape = self._shapes.get(tensor)
        if shape is None or len(shape) != 2:
            raise ProgramError(f"tensor {tensor!r} has shape {shape} where a matrix is needed")
        return shape[0]

    def embed(self, name: str, table: str, *, width: int, vocab: int, scale: float = 1.0) -> Tensor:
        weight = self._matrix(name, table, vocab, width)
        out = self._new(name, ROWS, width)
        self._operations.append(Embed(name, weight, scale, out))
        return out

    def norm(self, name: str, x: Tensor, weight: str, *, epsilon: float, group: int | None = None) -> Tensor:
        """`group`: normalise each run of that many numbers by itself (per head); default the whole line."""
        size = x.width if group is None else group
        if x.width % size:
            raise ProgramError(f"{name}: {x} is no whole number of groups of {size}")
        if not epsilon > 0:
            raise ProgramError(f"{name}: epsilon is {epsilon}")
        out = self._new(name, x.lines, x.width)
        self._operations.append(RmsNorm(name, x, self._vector(name, weight, size), epsilon, out))
        return out

    def linear(self, name: str, x: Tensor, weight: str, *, width: int, bias: str | None = None) -> Tensor:
        matrix = self._matrix(name, weight, width, x.width)
        vector = None if bias is None else self._vector(name, bias, width)
        out = self._new(name, x.lines, width)
        self._operations.append(Linear(name, x, matrix, vector, out))
        return out

    def rope(
        self,
        name: str,
        x: Tensor,
        *,
        heads: int,
        style: RopeStyle,
        turns: Turns,
        divisors: str | None = None,
    ) -> Tensor:
        dim = self._head_dim(name, x, heads)
        if dim % 2:
            raise ProgramError(f"{name}: heads of {x} have {dim} numbers, which are no pairs")
        if turns.dim != dim:
            raise ProgramError(f"{name}: the rope is for heads of {turns.dim}, those of {x} have {dim}")
        vector = None if divisors is None else self._vector(name, divisors, dim // 2)
        out = self._new(name, x.lines, x.width)
        self._operations.append(Rope(name, x, heads, style, turns, vector, out))
        return out

    def write_kv(self, name: str, k: Tensor, v: Tensor, *, layer: int, heads: int) -> LayerCache:
        dim = self._head_dim(name, k, heads)
        if (v.lines, v.width) != (k.lines, k.width):
            raise ProgramError(f"{name}: keys {k} and values {v} differ in shape")
        cache = LayerCache(layer, heads, dim)
        if any(other.layer == layer for other in self._caches):
            raise ProgramError(f"{name}: layer {layer} writes its pages twice")
        self._caches.append(cache)
        self._operations.append(WriteKv(name, cache, k, v))
        return cache

    def attend(
        self,
        name: str,
        q: Tensor,
        cache: LayerCache,
        *,
        q_heads: int,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        dim = self._head_dim(name, q, q_heads)
        if dim != cache.dim or q_heads % cache.heads:
            raise ProgramError(
                f"{name}: {q} as {q_heads} heads of {dim} does not fit {cache.heads} key heads of {cache.dim}"
            )
        if window < 0 or cap < 0:
            raise ProgramError(f"{name}: the window is {window}, the cap {cap}")
        out = self._new(name, q.lines, q.width)
        self._operations.append(Attend(name, cache, q, q_heads, scale, window, cap, out))
        return out

    def gate(self, name: str, gate: Tensor, up: Tensor, *, kind: ActivationKind) -> Tensor:
        out = self._same(name, gate, up)
        self._operations.append(Gate(name, kind, gate, up, out))
        return out

    def add(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        out = self._same(name, x, y)
        self._operations.append(Add(name, x, y, out))
        return out

    def pick_logit_rows(self, name: str, x: Tensor) -> Tensor:
        if x.lines != ROWS:
            raise ProgramError(f"{name}: {x} holds picked lines already")
        out = self._new(name, LOGIT_ROWS, x.width)
        self._operations.append(PickLogitRows(name, x, out))
        return out

    def soft_cap(self, name: str, x: Tensor, *, cap: float) -> Tensor:
        if not cap > 0:
            raise ProgramError(f"{name}: the cap is {cap}")
        out = self._new(name, x.lines, x.width)
        self._operations.append(SoftCap(name, x, cap, out))
        return out

    def program(self, result: Tensor | None, *, rope: str, hidden_size: int, vocab_size: int) -> Program:
        if result is not None and (result.lines, result.width) != (LOGIT_ROWS, vocab_size):
            raise ProgramError(f"the result {result} is no logits over {vocab_size} tokens")
        return Program(tuple(self._operations), result, tuple(self._caches), rope, hidden_size, vocab_size)

    def _new(self, name: str, lines: str, width: int) -> Tensor:
        if name in self._names:
            raise ProgramError(f"two operations are named {name}")
        self._names.add(name)
        return Tensor(name, lines, width)

    def _same(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        if (x.lines, x.width, x.dtype) != (y.lines, y.width, y.dtype):
            raise ProgramError(f"{name}: {x} and {y} differ in shape or dtype")
        return self._new(name, x.lines, x.width)

    def _head_dim(self, name: str, x: Tensor, heads: int) -> int:
        if heads < 1 or x.width % heads:
            raise ProgramError(f"{name}: {x} is no whole number of {heads} heads")
        return x.width // heads

    def _matrix(self, operation: str, name: str, rows: int, columns: int) -> Weight:
        self._check(operation, name, (rows, columns))
        return Weight((name,), rows, columns)

    def _vector(self, operation: str, name: str, width: int) -> Weight:
        self._check(operation, name, (width,))
        return Weight((name,), 1, width)

    def _check(self, operation: str, name: str, shape: Sequence[int]) -> None:
        found = self._shapes.get(name)
        if found is None:
            raise ProgramError(f"{operation}: the file has no tensor {name!r}")
        if tuple(found) != tuple(shape):
            raise ProgramError(
                f"{operation}: tensor {name!r} has shape {tuple(found)} where {tuple(shape)} is needed"
            )
        self._used.add(name)
