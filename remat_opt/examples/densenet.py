"""Densely connected networks: Huang et al., "Densely Connected Convolutional Networks", arXiv 1608.06993."""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import batch_norm, conv, padded_max_pool, remat_if


class DenseLayer(nn.Module):
    """The new features of one layer: (batch, h, w, c) → (batch, h, w, growth), by way of 4 * growth channels."""

    growth: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(batch_norm(train, dtype=self.dtype)(x))
        x = conv(4 * self.growth, 1, dtype=self.dtype)(x)
        x = nn.relu(batch_norm(train, dtype=self.dtype)(x))
        return conv(self.growth, 3, dtype=self.dtype)(x)


class Transition(nn.Module):
    """Halves channels, height and width: (batch, h, w, c) → (batch, h / 2, w / 2, c / 2)."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(batch_norm(train, dtype=self.dtype)(x))
        x = conv(x.shape[-1] // 2, 1, dtype=self.dtype)(x)
        return nn.avg_pool(x, (2, 2), (2, 2))


class DenseNet(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes); `block_sizes` counts layers per dense block.

    `remat` wraps every dense layer and every transition in `nn.remat`; the concatenations stay outside.
    """

    growth: int
    stem_features: int
    block_sizes: Sequence[int]
    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = conv(self.stem_features, 7, 2, dtype=self.dtype, name="stem")(x)
        x = nn.relu(batch_norm(train, dtype=self.dtype, name="stem_norm")(x))
        x = padded_max_pool(x)
        layer, transition = remat_if(self.remat, DenseLayer), remat_if(self.remat, Transition)
        for block, size in enumerate(self.block_sizes):
            for index in range(size):
                new = layer(self.growth, self.dtype, name=f"block{block + 1}_layer{index + 1}")(x, train)
                x = jnp.concatenate([x, new], -1)
            if block + 1 < len(self.block_sizes):
                x = transition(self.dtype, name=f"transition{block + 1}")(x, train)
        x = nn.relu(batch_norm(train, dtype=self.dtype, name="final_norm")(x))
        x = x.mean((1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x)


DENSENETS = {
    "densenet121": partial(DenseNet, 32, 64, (6, 12, 24, 16)),
    "densenet161": partial(DenseNet, 48, 96, (6, 12, 36, 24)),
    "densenet169": partial(DenseNet, 32, 64, (6, 12, 32, 32)),
    "densenet201": partial(DenseNet, 32, 64, (6, 12, 48, 32)),
}
