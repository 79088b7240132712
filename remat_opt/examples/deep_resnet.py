"""Residual networks of about a thousand layers, for images of ImageNet's size.

He et al., "Identity Mappings in Deep Residual Networks", arXiv 1603.05027: batch norm and relu stand before each
convolution, and nothing but the addition stands on the way of the identity. Chen et al., "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174, section 5.2, deepen every stage of it up to 1,000 layers, and do not say by
how much; here ResNet-200's stages (3, 24, 36, 3) are made five to six times as deep.
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import batch_norm, conv, padded_max_pool, remat_if


class PreActivationBlock(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut: (batch, h, w, c) → (batch, h / stride, w / stride, 4 * width).

    Where the shape changes, the shortcut is a projection of the activated input.
    """

    width: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        features = 4 * self.width
        y = nn.relu(batch_norm(train, dtype=self.dtype)(x))
        if self.stride != 1 or x.shape[-1] != features:
            x = conv(features, 1, self.stride, dtype=self.dtype, name="projection")(y)
        y = conv(self.width, 1, dtype=self.dtype)(y)
        y = nn.relu(batch_norm(train, dtype=self.dtype)(y))
        y = conv(self.width, 3, self.stride, dtype=self.dtype)(y)
        y = nn.relu(batch_norm(train, dtype=self.dtype)(y))
        return x + conv(features, 1, dtype=self.dtype)(y)


class PreActivationResNet(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes); `stage_sizes` counts the blocks per stage.

    There are 3 * sum(stage_sizes) + 2 layers. `remat` wraps every residual block in `nn.remat`.
    """

    stage_sizes: Sequence[int]
    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = conv(self.width, 7, 2, dtype=self.dtype, name="stem")(x)
        x = nn.relu(batch_norm(train, dtype=self.dtype, name="stem_norm")(x))
        x = padded_max_pool(x)
        block = remat_if(self.remat, PreActivationBlock)
        for stage, size in enumerate(self.stage_sizes):
            for index in range(size):
                stride = 2 if stage > 0 and index == 0 else 1
                name = f"stage{stage + 1}_block{index + 1}"
                x = block(self.width * 2**stage, stride, self.dtype, name=name)(x, train)
        x = nn.relu(batch_norm(train, dtype=self.dtype, name="final_norm")(x))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x.mean((1, 2)))


DEEP_RESNETS = {
    "resnet200": partial(PreActivationResNet, (3, 24, 36, 3)),
    "resnet1001": partial(PreActivationResNet, (15, 120, 180, 18)),
}
