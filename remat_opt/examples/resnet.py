"""Residual networks: He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385.

The bottleneck strides in its 3x3 convolution, not in its first 1x1 (the variant known as v1.5).
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import batch_norm, conv, padded_max_pool, remat_if


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (batch, h, w, c) → (batch, h / stride, w / stride, width)."""

    width: int
    stride: int
    dtype: jnp.dtype
    expansion = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = conv(self.width, 3, self.stride, dtype=self.dtype)(x)
        y = nn.relu(batch_norm(train, dtype=self.dtype)(y))
        y = conv(self.width, 3, dtype=self.dtype)(y)
        y = batch_norm(train, dtype=self.dtype)(y)
        return nn.relu(y + shortcut(x, self.width, self.stride, train, self.dtype))


class BottleneckBlock(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut: (batch, h, w, c) → (batch, h / stride, w / stride, 4 * width)."""

    width: int
    stride: int
    dtype: jnp.dtype
    expansion = 4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        features = self.width * self.expansion
        y = conv(self.width, 1, dtype=self.dtype)(x)
        y = nn.relu(batch_norm(train, dtype=self.dtype)(y))
        y = conv(self.width, 3, self.stride, dtype=self.dtype)(y)
        y = nn.relu(batch_norm(train, dtype=self.dtype)(y))
        y = conv(features, 1, dtype=self.dtype)(y)
        y = batch_norm(train, dtype=self.dtype)(y)
        return nn.relu(y + shortcut(x, features, self.stride, train, self.dtype))


def shortcut(x: jax.Array, features: int, stride: int, train: bool, dtype: jnp.dtype) -> jax.Array:
    """The identity where the shapes agree, else a strided 1x1 projection."""
    if stride == 1 and x.shape[-1] == features:
        return x
    projected = conv(features, 1, stride, dtype=dtype, name="projection")(x)
    return batch_norm(train, dtype=dtype, name="projection_norm")(projected)


class ResNet(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes); `stage_sizes` counts the blocks per stage.

    `remat` wraps every residual block in `nn.remat`.
    """

    block: type[BasicBlock] | type[BottleneckBlock]
    stage_sizes: Sequence[int]
    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = conv(64, 7, 2, dtype=self.dtype, name="stem")(x)
        x = nn.relu(batch_norm(train, dtype=self.dtype, name="stem_norm")(x))
        x = padded_max_pool(x)
        block = remat_if(self.remat, self.block)
        for stage, size in enumerate(self.stage_sizes):
            for index in range(size):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(64 * 2**stage, stride, self.dtype, name=f"stage{stage + 1}_block{index + 1}")(x, train)
        x = x.mean((1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x)


RESNETS = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, BottleneckBlock, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, BottleneckBlock, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, BottleneckBlock, (3, 8, 36, 3)),
}
