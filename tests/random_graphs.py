"""Training graphs: typed by hand with a `Sketch`, or random, from a seed or as hypothesis strategies.

A random graph is a function of a `random.Random`. From `random.Random(seed)` it is the same in every run; hypothesis
gives a `Random` of its own, whose choices it shrinks.
"""

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from remat_opt.graph.derive import Choice
from remat_opt.graph.fusion import fuse
from remat_opt.graph.graph import Graph, Kind, Op

# What a step to plan is made of; the other kinds are of compiled programs.
KINDS = [Kind.ELEMENTWISE, Kind.REDUCTION, Kind.CONTRACTION, Kind.OPAQUE]


class Sketch:
    """A graph in the making. Its methods return the ids of the values that they add."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.inputs: list[int] = []
        self.ops: list[Op] = []

    def value(self, size: int) -> int:
        """A value that nobody makes yet."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def input(self, size: int) -> int:
        """An argument of the step."""
        self.inputs.append(self.value(size))
        return self.inputs[-1]

    def op(
        self, *reads: int, size: int, kind: Kind = Kind.OPAQUE, seconds: float = 1.0, repeatable: bool = True
    ) -> int:
        """An op with one result of `size` bytes."""
        return self.ops_of(*reads, sizes=(size,), kind=kind, seconds=seconds, repeatable=repeatable)[0]

    def ops_of(
        self, *reads: int, sizes: Sequence[int], kind: Kind = Kind.OPAQUE, seconds: float = 1.0, repeatable: bool = True
    ) -> tuple[int, ...]:
        """An op with one result of each size."""
        results = tuple(map(self.value, sizes))
        self.ops.append(Op(reads, results, kind, seconds, seconds, repeatable))
        return results

    def elementwise(self, *reads: int, size: int) -> int:
        return self.op(*reads, size=size, kind=Kind.ELEMENTWISE)

    def graph(self, *outputs: int, donated: dict[int, int] | None = None) -> Graph:
        """The finished graph; `donated` says which argument's place each output takes (argument → output)."""
        aliases = tuple((donated or {}).items())
        return Graph(tuple(self.sizes), tuple(self.ops), tuple(self.inputs), outputs, aliases)


def training_chain(sizes: Sequence[int], kind: Kind = Kind.OPAQUE) -> Graph:
    """Forward and backward of layers in a row; layer i's result and its cotangent take `sizes[i]` bytes.

    Layer i is op i. The loss is op n = len(sizes) and makes the last result's cotangent. Op n + 1 + k is the backward
    of layer n − 1 − k, which reads the cotangent of the layer's result, that result, and the layer's operand.
    """
    sketch = Sketch()
    results = [sketch.input(sizes[0])]
    for size in sizes:
        results.append(sketch.op(results[-1], size=size, kind=kind))
    cotangent = sketch.op(results[-1], size=sizes[-1], kind=kind)
    for layer in range(len(sizes) - 1, -1, -1):
        size = sizes[layer - 1] if layer else 1
        cotangent = sketch.op(cotangent, results[layer + 1], results[layer], size=size, kind=kind)
    return sketch.graph(cotangent)


def training_graph(source: random.Random, layers: int) -> Graph:
    """A random step of kernels, all of whose values are buffers."""
    return fuse(unfused_training_graph(source, layers)).graph


def unfused_training_graph(source: random.Random, layers: int) -> Graph:
    """A random step: forward ops on earlier values, a loss, backward ops in reverse order, updates for some weights.

    Every kind of op occurs, values without bytes, ops with two results, ops that may not run twice, results that the
    backward never reads, donated weights with and without momentum, readers of a weight after its update, and outputs
    from the middle of the forward.
    """
    return _RandomStep(source, layers).graph()


class _RandomStep:
    def __init__(self, source: random.Random, layers: int):
        self.source = source
        self.sketch = Sketch()
        self.data = [self.sketch.input(self.size()) for _ in range(source.randint(1, 2))]
        self.weights = [self.sketch.input(self.size()) for _ in range(source.randint(0, layers))]
        self.donate = source.random() < 0.7
        self.moments = {w: self.sketch.input(self.sketch.sizes[w]) for w in self.weights if source.random() < 0.3}
        self.layers = layers

    def size(self) -> int:
        return self.source.randint(0, 9)

    def graph(self) -> Graph:
        loss = self.forward()
        gradients = self.backward(loss)
        outputs, donated = [loss], {}
        for weight, gradient in gradients.items():
            if self.source.random() < 0.3:
                outputs.append(gradient)
                continue
            updated = self.update(weight, gradient)
            outputs.extend(updated.values())
            donated.update(updated)
            if self.source.random() < 0.3:  # a norm or an average of the old weight
                outputs.append(self.sketch.op(weight, size=self.size(), kind=self.source.choice(KINDS)))
        outputs += [self.source.choice(op.outputs) for op in self.sketch.ops if self.source.random() < 0.05]
        return self.sketch.graph(*dict.fromkeys(outputs), donated=donated if self.donate else {})

    def forward(self) -> int:
        free = list(self.weights)
        values = list(self.data)
        for _ in range(self.layers):
            reads = [values[-1 - min(self.source.randint(0, 4), len(values) - 1)] for _ in range(2)]
            reads = reads[: self.source.randint(1, 2)]
            if free and self.source.random() < 0.6:
                reads.append(free.pop())
            values += self.sketch.ops_of(
                *dict.fromkeys(reads),
                sizes=[self.size() for _ in range(2 if self.source.random() < 0.2 else 1)],
                kind=self.source.choice(KINDS),
                seconds=self.source.randint(1, 5),
                repeatable=self.source.random() > 0.1,
            )
        read = {value for op in self.sketch.ops for value in op.inputs}
        ends = [v for v in values if v not in read and self.source.random() < 0.8] or values[-1:]
        return self.sketch.op(*ends, size=1, kind=Kind.REDUCTION)

    def backward(self, loss: int) -> dict[int, int]:
        """For each weight that the loss depends on its gradient."""
        forward = tuple(self.sketch.ops)
        cotangents = {value: self.sketch.op(loss, size=self.sketch.sizes[value]) for value in forward[-1].inputs}
        for op in reversed(forward[:-1]):
            arrived = [cotangents[value] for value in op.outputs if value in cotangents]
            if not arrived:
                continue
            residuals = [value for value in (*op.inputs, *op.outputs) if self.source.random() < 0.6]
            targets = [value for value in op.inputs if value not in self.data]
            if not targets:
                continue
            kind = self.source.choice(KINDS)
            sizes = [self.sketch.sizes[value] for value in targets]
            made = self.sketch.ops_of(*dict.fromkeys((*arrived, *residuals)), sizes=sizes, kind=kind)
            for value, cotangent in zip(targets, made, strict=True):
                if value in cotangents:
                    size = self.sketch.sizes[value]
                    cotangent = self.sketch.elementwise(cotangents[value], cotangent, size=size)
                cotangents[value] = cotangent
        return {weight: cotangents[weight] for weight in self.weights if weight in cotangents}

    def update(self, weight: int, gradient: int) -> dict[int, int]:
        """The arguments that are replaced, with what replaces them."""
        size = self.sketch.sizes[weight]
        if weight not in self.moments:
            return {weight: self.sketch.elementwise(weight, gradient, size=size)}
        moment = self.moments[weight]
        decayed = self.sketch.elementwise(moment, size=size)
        new_moment = self.sketch.elementwise(decayed, gradient, size=size)
        return {moment: new_moment, weight: self.sketch.elementwise(weight, new_moment, size=size)}


def random_choice(source: random.Random, graph: Graph) -> Choice:
    """Any choice at all: up to three forward/backward boundaries, up to four more cuts, a random set of saved
    values."""
    ops = len(graph.ops)
    boundaries = {source.randint(0, ops) for _ in range(source.randint(0, 3))}
    cuts = {source.randint(0, ops) for _ in range(source.randint(0, 4))}
    share = source.choice([0.0, 0.2, 0.5])
    saved = frozenset(value for value in range(len(graph.sizes)) if source.random() < share)
    return Choice(saved, tuple(sorted(boundaries)), tuple(sorted(cuts | boundaries)))


@st.composite
def training_graphs(draw: st.DrawFn, max_layers: int = 8) -> Graph:
    """Graphs of `training_graph`."""
    return fuse(draw(unfused_training_graphs(max_layers))).graph


@st.composite
def unfused_training_graphs(draw: st.DrawFn, max_layers: int = 8) -> Graph:
    """Graphs of `unfused_training_graph`."""
    layers = draw(st.integers(1, max_layers))
    return unfused_training_graph(draw(st.randoms(use_true_random=False)), layers)


@st.composite
def graphs_with_choices(draw: st.DrawFn, max_layers: int = 8) -> tuple[Graph, Choice]:
    """A graph with a choice of what to save in it."""
    graph = draw(training_graphs(max_layers))
    return graph, random_choice(draw(st.randoms(use_true_random=False)), graph)
