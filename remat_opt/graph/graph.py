"""The dataflow graph of one training step, as the searches see it: integers, bytes and FLOPs, and no JAX.

*Values* and *ops* are numbered. An op reads values and makes values; the order of `Graph.ops` is the program's order
and a topological one.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Kind(enum.Enum):
    """What a compiler does with an op's operands and results (see `fusion.py`)."""

    ELEMENTWISE = "elementwise"  # fused into its users: neither operands nor results need buffers of their own
    REDUCTION = "reduction"  # its producers are fused into it; its result is a buffer
    CONTRACTION = "contraction"  # a library convolution or product: operands and results are buffers
    OPAQUE = "opaque"  # loops, sorts, calls, …: operands and results are buffers


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        inputs: ids of the values it reads; constants of the program are not among them.
        outputs: ids of the values it makes.
        kind: how the compiler treats it.
        flops: floating point operations of one run.
        seconds: estimated time of one run on the target.
        repeatable: whether it may be run a second time.
        name: the primitive's name, for reports only.
        workspace: bytes that are live only while it runs, beside its operands and results.
        expensive: elementwise, but too much arithmetic to be done in more than one kernel.
        expensive_operands: of a kernel, operands that it does expensive arithmetic on and reads beside that, too.
        same_place: operands that it reads at the place alone where it writes, so that its result may be written over
            one of as many bytes that nobody reads later.
        traffic: of a kernel, the bytes that it reads and writes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: Kind = Kind.OPAQUE
    flops: float = 0.0
    seconds: float = 0.0
    repeatable: bool = True
    name: str = ""
    workspace: int = 0
    expensive: bool = False
    expensive_operands: tuple[int, ...] = ()
    same_place: tuple[int, ...] = ()
    traffic: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Lists:
    """Many lists of values in one array: list i is `values[start[i] : start[i] + counts[i]]`."""

    values: np.ndarray
    start: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, lists: Sequence[Sequence[int]]) -> Lists:
        """From a sequence of sequences."""
        counts = np.array([len(one) for one in lists], dtype=np.int64)
        values = np.fromiter((value for one in lists for value in one), dtype=np.int64, count=int(counts.sum()))
        return cls(values, np.cumsum(counts) - counts, counts)

    def of(self, which: np.ndarray) -> np.ndarray:
        """The lists `which`, one behind the other."""
        return self.values[self.places(which, self.counts[which])]

    def places(self, which: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Where in `values` the lists `which` stand, one behind the other, of which each has so many values."""
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return np.repeat(self.start[which] - ends + counts, counts) + np.arange(total)


class Events(NamedTuple):
    """What each op reads and then makes, and which of these it makes."""

    touched: Lists
    makes: Lists


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A step: `sizes[v]` bytes for each value, ops in program order.

    Attributes:
        sizes: bytes of each value.
        ops: the operations.
        inputs: values that exist before the first op (arguments and captured constants).
        outputs: values that the step returns.
        aliases: (input, output) pairs that share one buffer, because the input was donated.
        constants: values that depend on no input; they are made afresh wherever they are read and cost no memory.
        held: outputs that are buffers until the return, as in a loop's body, where they are no results of the caller's.
        fused: whether elementwise work was merged into its readers (`fusion.fuse`), so that all values are buffers.
        host: values in the host's memory, of no bytes: stacks that one loop puts there for another.
    """

    sizes: tuple[int, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    constants: frozenset[int] = frozenset()
    fused: bool = False
    held: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()

    def __post_init__(self):
        check(self)

    @functools.cached_property
    def producer(self) -> tuple[int, ...]:
        """The op that makes each value; −1 for inputs."""
        producer = [-1] * len(self.sizes)
        for index, op in enumerate(self.ops):
            for value in op.outputs:
                producer[value] = index
        return tuple(producer)

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The ops that read each value, in program order, each once."""
        users: list[list[int]] = [[] for _ in self.sizes]
        for index, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                users[value].append(index)
        return tuple(map(tuple, users))

    @functools.cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """What each op reads, as it is written."""
        return tuple(op.inputs for op in self.ops)

    @functools.cached_property
    def reads(self) -> Lists:
        """What each op reads."""
        return Lists.make(self.operands)

    @functools.cached_property
    def makes(self) -> Lists:
        """What each op makes."""
        return Lists.make([op.outputs for op in self.ops])

    @functools.cached_property
    def events(self) -> Events:
        """What each op does to values, as it does it."""
        touched = Lists.make([(*op.inputs, *op.outputs) for op in self.ops])
        makes = itertools.chain.from_iterable([False] * len(op.inputs) + [True] * len(op.outputs) for op in self.ops)
        return Events(touched, Lists(np.fromiter(makes, dtype=bool), touched.start, touched.counts))

    @functools.cached_property
    def reduces(self) -> np.ndarray:
        """For each op whether it is a reduction."""
        return np.array([op.kind is Kind.REDUCTION for op in self.ops], dtype=bool)

    @functools.cached_property
    def overwritable(self) -> np.ndarray:
        """For each of `events.touched`, whether it is an operand that the op's one result may be written over."""
        found: list[bool] = []
        for op in self.ops:
            fits = self.overwritable_by(op)
            found += [value in fits for value in op.inputs] + [False] * len(op.outputs)
        return np.array(found, dtype=bool)

    def overwritable_by(self, op: Op) -> tuple[int, ...]:
        """Operands that an op's one result may be written over."""
        if len(op.outputs) != 1 or any(self.ops[user].kind is Kind.REDUCTION for user in self.users[op.outputs[0]]):
            return ()
        return tuple(value for value in op.same_place if self.sizes[value] == self.sizes[op.outputs[0]])

    @functools.cached_property
    def results(self) -> np.ndarray:
        """Outputs that are the caller's."""
        return np.array([value for value in self.outputs if value not in self.held], dtype=np.int64)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """For each value the index in `inputs` of the donated argument whose place it takes; −1 for none."""
        index = {value: at for at, value in enumerate(self.inputs)}
        places = np.full(len(self.sizes), -1, dtype=np.int64)
        for given, output in self.aliases:
            places[output] = index[given]
        return places

    @functools.cached_property
    def size_array(self) -> np.ndarray:
        """`sizes` as an array."""
        return np.array(self.sizes, dtype=np.int64)

    @functools.cached_property
    def workspaces(self) -> np.ndarray:
        """`Op.workspace` of each op."""
        return np.array([op.workspace for op in self.ops], dtype=np.int64)

    @functools.cached_property
    def op_flops(self) -> np.ndarray:
        """`Op.flops` of each op."""
        return np.array([op.flops for op in self.ops], dtype=float)

    @functools.cached_property
    def op_seconds(self) -> np.ndarray:
        """`Op.seconds` of each op."""
        return np.array([op.seconds for op in self.ops], dtype=float)

    @functools.cached_property
    def always_there(self) -> np.ndarray:
        """Values that need no saving: arguments, results, and what may not be made twice."""
        once = [value for op in self.ops if not op.repeatable for value in op.outputs]
        return np.array([*self.inputs, *self.outputs, *once], dtype=np.int64)

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of the step when every op runs once."""
        return sum(op.flops for op in self.ops)

    @functools.cached_property
    def seconds(self) -> float:
        """Estimated seconds of the step when every op runs once."""
        return sum(op.seconds for op in self.ops)


def check(graph: Graph) -> None:
    """Raise ValueError where a graph is no dataflow graph: a cycle, a negative size, an output that nobody makes."""
    made = set(graph.inputs)
    negative = [value for value, size in enumerate(graph.sizes) if size < 0]
    if negative:
        raise ValueError(f"expected sizes of at least 0 bytes, value {negative[0]} has {graph.sizes[negative[0]]}")
    for index, op in enumerate(graph.ops):
        missing = [value for value in op.inputs if value not in made]
        if missing:
            raise ValueError(
                f"expected ops in topological order: op {index} reads value {missing[0]}, which no earlier op makes "
                "and which is no input (a cycle, or an op that stands too early)"
            )
        for value in op.outputs:
            if value in made:
                raise ValueError(f"expected each value to be made once: op {index} makes value {value} again")
            made.add(value)
    unreachable = [value for value in graph.outputs if value not in made]
    if unreachable:
        raise ValueError(f"expected every output to be made by an op or to be an input: value {unreachable[0]} is not")


def chain(sizes: Sequence[int], seconds: float = 1.0) -> Graph:
    """A chain of ops, one value each, for tests and examples."""
    ops = tuple(
        Op((index - 1,) if index else (), (index,), seconds=seconds, flops=seconds) for index in range(len(sizes))
    )
    return Graph(tuple(sizes), ops, outputs=(len(sizes) - 1,))
