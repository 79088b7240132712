"""U-Net: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", arXiv 1505.04597.

As in the paper no convolution pads, so the border of the image gets no prediction: 572 pixels in, 388 out.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import conv, he_normal, remat_if


class DoubleConv(nn.Module):
    """Two unpadded 3x3 convolutions with relu: (batch, h, w, c) → (batch, h - 4, w - 4, features)."""

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(2):
            x = nn.relu(conv(self.features, 3, padding=0, use_bias=True, dtype=self.dtype)(x))
        return x


class UNet(nn.Module):
    """Images (batch, height, width, channels) → logits (batch, h', w', num_classes) of the pixels inside the border.

    `depth` counts the halvings. `remat` wraps every pair of convolutions in `nn.remat`.
    """

    num_classes: int = 2
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    dropout_rate: float = 0.5
    features: int = 64
    depth: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        double = remat_if(self.remat, DoubleConv)
        skips: list[jax.Array] = []
        for level in range(self.depth):
            x = double(self.features * 2**level, self.dtype, name=f"down{level + 1}")(x, train)
            if x.shape[1] % 2 or x.shape[2] % 2:
                raise ValueError(f"expected even sides before each halving (as from 572), got {x.shape[1:3]}")
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = double(self.features * 2**self.depth, self.dtype, name="bottom")(x, train)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        for level in reversed(range(self.depth)):
            features = self.features * 2**level
            rise = nn.ConvTranspose(features, (2, 2), (2, 2), dtype=self.dtype, kernel_init=he_normal)
            x = jnp.concatenate([centre(skips[level], 2 * x.shape[1], 2 * x.shape[2]), rise(x)], -1)
            x = double(features, self.dtype, name=f"up{level + 1}")(x, train)
        return conv(self.num_classes, 1, use_bias=True, dtype=self.dtype, name="classifier")(x)


def centre(x: jax.Array, height: int, width: int) -> jax.Array:
    """The middle of an image or of a map of labels: (batch, h, w, …) → (batch, height, width, …)."""
    top, left = (x.shape[1] - height) // 2, (x.shape[2] - width) // 2
    return x[:, top : top + height, left : left + width]


UNETS = {"unet": UNet}
