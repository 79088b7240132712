"""Networks of searched cells for CIFAR-10, all in the frame of DARTS.

NASNet-A: Zoph et al., arXiv 1707.07012. AmoebaNet-A: Real et al., arXiv 1802.01548. DARTS (second order): Liu et al.,
arXiv 1806.09055, whose authors train the three alike: 20 cells of 36 channels, two of them reductions, each reading
the two cells before it. Without the auxiliary classifier and without dropped paths.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import batch_norm, conv, padded_average_pool, padded_max_pool, remat_if

Step = tuple[tuple[str, int], tuple[str, int]]


class Wiring(NamedTuple):
    """One cell: each step adds two operations, (name, state it reads), and makes a state; `joined` are put out.

    States 0 and 1 are the cell's inputs, from the last but one and from the last cell; step i makes state i + 2.
    """

    steps: Sequence[Step]
    joined: Sequence[int]


class CellPair(NamedTuple):
    """The two cells that make a network."""

    normal: Wiring
    reduction: Wiring


NASNET = CellPair(
    normal=Wiring(
        (
            (("separable5", 1), ("separable3", 0)),
            (("separable5", 0), ("separable3", 0)),
            (("average", 1), ("identity", 0)),
            (("average", 0), ("average", 0)),
            (("separable3", 1), ("identity", 1)),
        ),
        (2, 3, 4, 5, 6),
    ),
    reduction=Wiring(
        (
            (("separable5", 1), ("separable7", 0)),
            (("maximum", 1), ("separable7", 0)),
            (("average", 1), ("separable5", 0)),
            (("identity", 3), ("average", 2)),
            (("separable3", 2), ("maximum", 1)),
        ),
        (4, 5, 6),
    ),
)
AMOEBANET = CellPair(
    normal=Wiring(
        (
            (("average", 0), ("maximum", 1)),
            (("separable3", 0), ("separable5", 2)),
            (("separable3", 0), ("average", 3)),
            (("separable3", 1), ("identity", 1)),
            (("identity", 0), ("average", 1)),
        ),
        (4, 5, 6),
    ),
    reduction=Wiring(
        (
            (("average", 0), ("separable3", 1)),
            (("maximum", 0), ("separable7", 2)),
            (("separable7", 0), ("average", 1)),
            (("maximum", 0), ("maximum", 1)),
            (("split7", 0), ("separable3", 5)),
        ),
        (3, 4, 6),
    ),
)
DARTS = CellPair(
    normal=Wiring(
        (
            (("separable3", 0), ("separable3", 1)),
            (("separable3", 0), ("separable3", 1)),
            (("separable3", 1), ("identity", 0)),
            (("identity", 0), ("dilated3", 2)),
        ),
        (2, 3, 4, 5),
    ),
    reduction=Wiring(
        (
            (("maximum", 0), ("maximum", 1)),
            (("identity", 2), ("maximum", 1)),
            (("maximum", 0), ("identity", 2)),
            (("identity", 2), ("maximum", 1)),
        ),
        (2, 3, 4, 5),
    ),
)


class SeparableConv(nn.Module):
    """Relu, depthwise and 1x1 convolution, batch norm, and all that once more at stride 1."""

    kernel: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        channels = x.shape[-1]
        for stride in (self.stride, 1):
            x = conv(channels, self.kernel, stride, groups=channels, dtype=self.dtype)(nn.relu(x))
            x = batch_norm(train, dtype=self.dtype)(conv(channels, 1, dtype=self.dtype)(x))
        return x


class DilatedConv(nn.Module):
    """Relu, depthwise convolution with holes, 1x1 convolution, batch norm."""

    kernel: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        channels = x.shape[-1]
        x = conv(channels, self.kernel, self.stride, dilation=2, groups=channels, dtype=self.dtype)(nn.relu(x))
        return batch_norm(train, dtype=self.dtype)(conv(channels, 1, dtype=self.dtype)(x))


class SplitConv(nn.Module):
    """Relu, a 7x7 convolution split into 1x7 and 7x1, batch norm."""

    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        channels = x.shape[-1]
        x = conv(channels, (1, 7), (1, self.stride), dtype=self.dtype)(nn.relu(x))
        x = conv(channels, (7, 1), (self.stride, 1), dtype=self.dtype)(x)
        return batch_norm(train, dtype=self.dtype)(x)


class Projection(nn.Module):
    """Relu, 1x1 convolution, batch norm: (batch, h, w, c) → (batch, h, w, channels)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return batch_norm(train, dtype=self.dtype)(conv(self.channels, 1, dtype=self.dtype)(nn.relu(x)))


class HalvingProjection(nn.Module):
    """The same at half the size, half of the channels from the odd pixels: → (batch, h / 2, w / 2, channels)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(x)
        halves = [conv(self.channels // 2, 1, 2, dtype=self.dtype)(pixels) for pixels in (x, x[:, 1:, 1:])]
        return batch_norm(train, dtype=self.dtype)(jnp.concatenate(halves, -1))


def operation(name: str, x: jax.Array, train: bool, stride: int, dtype: jnp.dtype) -> jax.Array:
    """One operation of a cell: (batch, h, w, c) → (batch, h / stride, w / stride, c)."""
    match name:
        case "maximum":
            return padded_max_pool(x, stride)
        case "average":
            return padded_average_pool(x, stride)
        case "identity":
            return x if stride == 1 else HalvingProjection(x.shape[-1], dtype)(x, train)
        case "separable3" | "separable5" | "separable7":
            return SeparableConv(int(name[-1]), stride, dtype)(x, train)
        case "dilated3":
            return DilatedConv(3, stride, dtype)(x, train)
        case "split7":
            return SplitConv(stride, dtype)(x, train)
        case _:
            raise ValueError(f"expected an operation of a cell, got {name!r}")


class Cell(nn.Module):
    """Two earlier outputs, (batch, h, w, c) → (batch, h / stride, w / stride, joined states * channels).

    The older one may be twice as large, after a reduction.
    """

    wiring: Wiring
    channels: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, older: jax.Array, newer: jax.Array, train: bool) -> jax.Array:
        project_older = Projection if older.shape[1] == newer.shape[1] else HalvingProjection
        states = [
            project_older(self.channels, self.dtype)(older, train),
            Projection(self.channels, self.dtype)(newer, train),
        ]
        for step in self.wiring.steps:
            results = []
            for name, source in step:
                stride = self.stride if source < 2 else 1  # states made inside a reduction are already small
                results.append(operation(name, states[source], train, stride, self.dtype))
            states.append(results[0] + results[1])
        return jnp.concatenate([states[index] for index in self.wiring.joined], -1)


class CellNetwork(nn.Module):
    """Images (batch, height, width, 3), sides divisible by 4 → logits (batch, num_classes).

    `remat` wraps every cell in `nn.remat`.
    """

    cells: CellPair
    num_classes: int = 10
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    channels: int = 36
    layers: int = 20

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = conv(3 * self.channels, 3, dtype=self.dtype, name="stem")(x)
        older = newer = batch_norm(train, dtype=self.dtype, name="stem_norm")(x)
        cell = remat_if(self.remat, Cell, train_argument=3)
        reductions = (self.layers // 3, 2 * self.layers // 3)
        channels = self.channels
        for layer in range(self.layers):
            stride = 2 if layer in reductions else 1
            channels *= stride
            wiring = self.cells.reduction if layer in reductions else self.cells.normal
            made = cell(wiring, channels, stride, self.dtype, name=f"cell{layer + 1}")(older, newer, train)
            older, newer = newer, made
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(newer.mean((1, 2)))


CELL_NETWORKS = {
    "nasnet": partial(CellNetwork, NASNET),
    "amoebanet": partial(CellNetwork, AMOEBANET),
    "darts": partial(CellNetwork, DARTS),
}
