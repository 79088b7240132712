"""Wide residual networks for 32x32 images: Zagoruyko & Komodakis, "Wide Residual Networks", arXiv 1605.07146.

WRN-28-2 is the network of Sohoni et al., "Low-Memory Neural Network Training", arXiv 1904.10631.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import batch_norm, conv, remat_if


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and relu: (batch, h, w, c) → (batch, h / stride, w / stride, width).

    Where the shape changes, the shortcut is a projection of the activated input.
    """

    width: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.relu(batch_norm(train, dtype=self.dtype)(x))
        if self.stride != 1 or x.shape[-1] != self.width:
            x = conv(self.width, 1, self.stride, dtype=self.dtype, name="projection")(y)
        y = conv(self.width, 3, self.stride, dtype=self.dtype)(y)
        y = nn.relu(batch_norm(train, dtype=self.dtype)(y))
        return x + conv(self.width, 3, dtype=self.dtype)(y)


class WideResNet(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes); `depth` is 6 * blocks per stage + 4.

    `remat` wraps every residual block in `nn.remat`.
    """

    depth: int = 28
    widening: int = 2
    num_classes: int = 10
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        blocks, rest = divmod(self.depth - 4, 6)
        if rest:
            raise ValueError(f"expected a depth of 6 * n + 4 (10, 16, 22, 28, …), got {self.depth}")
        x = conv(16, 3, dtype=self.dtype, name="stem")(x)
        block = remat_if(self.remat, WideBlock)
        for stage in range(3):
            width = 16 * self.widening * 2**stage
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(width, stride, self.dtype, name=f"stage{stage + 1}_block{index + 1}")(x, train)
        x = nn.relu(batch_norm(train, dtype=self.dtype, name="final_norm")(x))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x.mean((1, 2)))


WIDE_RESNETS = {"wide_resnet28_2": partial(WideResNet, 28, 2), "wide_resnet28_10": partial(WideResNet, 28, 10)}
