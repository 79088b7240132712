"""Randomly wired networks: Xie et al., "Exploring Randomly Wired Neural Networks", arXiv 1904.01569.

The stages are directed graphs drawn by the generator of Watts & Strogatz, WS(4, 0.75), with 32 nodes (the first one
of the regular regime has 16). The seed is fixed: a name always gives the same network. How many nodes read a stage's
input decides the number of parameters; of the first ten seeds, each network has the one closest to the paper's mean.
"""

import operator
from collections.abc import Sequence
from functools import partial, reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from remat_opt.examples.layers import batch_norm, conv, remat_if


def watts_strogatz(nodes: int, neighbours: int, probability: float, seed: int) -> tuple[tuple[int, ...], ...]:
    """The nodes that each node reads, of a random graph whose edges go from the lower to the higher number.

    A ring where each node knows `neighbours` others, half of them on either side; going round once for each distance,
    the edge to the next clockwise is moved to a random node with `probability`.
    """
    random = np.random.default_rng(seed)
    linked = np.zeros((nodes, nodes), bool)
    distances = range(1, neighbours // 2 + 1)
    for distance in distances:
        for node in range(nodes):
            linked[node, (node + distance) % nodes] = linked[(node + distance) % nodes, node] = True
    for distance in distances:
        for node in range(nodes):
            free = np.flatnonzero(~linked[node] & (np.arange(nodes) != node))
            if random.random() < probability and free.size:
                old, new = (node + distance) % nodes, int(random.choice(free))
                linked[node, old] = linked[old, node] = False
                linked[node, new] = linked[new, node] = True
    return tuple(tuple(int(source) for source in np.flatnonzero(linked[node, :node])) for node in range(nodes))


class Node(nn.Module):
    """Sum of the inputs, weighted by a sigmoid; relu, depthwise and 1x1 convolution, batch norm: → (…, channels)."""

    channels: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: Sequence[jax.Array], train: bool) -> jax.Array:
        x = inputs[0]
        if len(inputs) > 1:
            weights = nn.sigmoid(self.param("weights", nn.initializers.zeros, (len(inputs),))).astype(self.dtype)
            x = reduce(operator.add, (weight * y for weight, y in zip(weights, inputs, strict=True)))
        x = conv(x.shape[-1], 3, self.stride, groups=x.shape[-1], dtype=self.dtype)(nn.relu(x))
        return batch_norm(train, dtype=self.dtype)(conv(self.channels, 1, dtype=self.dtype)(x))


class RandomStage(nn.Module):
    """A random graph of nodes: (batch, h, w, c) → (batch, h / 2, w / 2, channels).

    Nodes that read no other one read the stage's input and stride; the output is the mean of those that none reads.
    """

    wiring: tuple[tuple[int, ...], ...]
    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        values: list[jax.Array] = []
        for number, sources in enumerate(self.wiring):
            node = Node(self.channels, 1 if sources else 2, self.dtype, name=f"node{number + 1}")
            values.append(node([values[source] for source in sources] or [x], train))
        read = {source for sources in self.wiring for source in sources}
        unread = [value for number, value in enumerate(values) if number not in read]
        return reduce(operator.add, unread) / len(unread)


class RandomlyWired(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes).

    `regular` makes the second convolution a random stage of half as many nodes, too. `remat` wraps every random stage
    in `nn.remat`.
    """

    channels: int = 109
    regular: bool = True
    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    nodes: int = 32
    seed: int = 0
    head: int = 1280

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def norm(y: jax.Array, name: str) -> jax.Array:
            return batch_norm(train, dtype=self.dtype, name=name)(y)

        x = norm(conv(self.channels // 2, 3, 2, dtype=self.dtype, name="stem")(x), "stem_norm")
        stage = remat_if(self.remat, RandomStage)
        widths = [self.channels * factor for factor in (1, 2, 4, 8)] if self.regular else []
        if not self.regular:
            x = norm(conv(self.channels, 3, 2, dtype=self.dtype, name="conv2")(nn.relu(x)), "conv2_norm")
            widths = [self.channels * factor for factor in (1, 2, 4)]
        for index, width in enumerate(widths):
            nodes = self.nodes // 2 if self.regular and index == 0 else self.nodes
            wiring = watts_strogatz(nodes, 4, 0.75, self.seed + index)
            x = stage(wiring, width, self.dtype, name=f"stage{index + 1}")(x, train)
        x = nn.relu(norm(conv(self.head, 1, dtype=self.dtype, name="head")(nn.relu(x)), "head_norm"))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x.mean((1, 2)))


RANDOMLY_WIRED = {
    "randwire_small": partial(RandomlyWired, 78, False, seed=4),
    "randwire_regular": partial(RandomlyWired, 109, True, seed=3),
}
