"""Layers that several image networks share. All images are NHWC: (batch, height, width, channels)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")  # He et al., arXiv 1502.01852


def remat_if(remat: bool, block: type[nn.Module], *, train_argument: int = 2) -> type[nn.Module]:
    """`block`, wrapped in `nn.remat` if asked; its `__call__(x, train)` then needs `train` by position.

    `train_argument` is the position of `train`, counted from self. `nn.remat` renames the class, so give the block a
    name for the same parameter tree with and without.
    """
    return nn.remat(block, static_argnums=(train_argument,)) if remat else block


def conv(
    features: int,
    kernel: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    *,
    dtype: jnp.dtype,
    padding: int | None = None,
    dilation: int = 1,
    groups: int = 1,
    use_bias: bool = False,
    name: str | None = None,
) -> nn.Conv:
    """Convolution with symmetric padding, by default the one that keeps the size at stride 1 (odd kernels)."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    pads = [dilation * (side // 2) if padding is None else padding for side in sides]
    return nn.Conv(
        features,
        sides,
        (stride, stride) if isinstance(stride, int) else stride,
        padding=[(pad, pad) for pad in pads],
        kernel_dilation=dilation,
        feature_group_count=groups,
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=he_normal,
        name=name,
    )


def batch_norm(train: bool, *, dtype: jnp.dtype, epsilon: float = 1e-5, name: str | None = None) -> nn.BatchNorm:
    """Batch normalisation (Ioffe & Szegedy, arXiv 1502.03167), with batch statistics while training."""
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=epsilon, dtype=dtype, name=name)


def padded_max_pool(x: jax.Array, stride: int = 2) -> jax.Array:
    """3x3 maximum with padding 1: (batch, h, w, c) → (batch, h / stride, w / stride, c)."""
    padding: Any = ((1, 1), (1, 1))  # annotated as str
    return nn.max_pool(x, (3, 3), (stride, stride), padding=padding)


def padded_average_pool(x: jax.Array, stride: int = 1, *, count_padding: bool = False) -> jax.Array:
    """3x3 mean with padding 1, of the pixels inside the image or, with `count_padding`, of all nine."""
    padding: Any = ((1, 1), (1, 1))  # annotated as str
    return nn.avg_pool(x, (3, 3), (stride, stride), padding=padding, count_include_pad=count_padding)


def adaptive_average_pool(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """(batch, height, width, channels) → (batch, *size, channels), any size; a map that fits is left alone.

    Cell i of n averages the pixels from floor(i * length / n) up to ceil((i + 1) * length / n), as PyTorch has it.
    """
    for axis, cells in zip((1, 2), size, strict=True):
        length = x.shape[axis]
        if length == cells:
            continue
        weights = np.zeros((cells, length))
        for cell in range(cells):
            start, stop = cell * length // cells, -(-(cell + 1) * length // cells)
            weights[cell, start:stop] = 1 / (stop - start)
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(weights, x.dtype), ((axis,), (1,))), -1, axis)
    return x


class DropoutClassifier(nn.Module):
    """Three dense layers, the hidden two with dropout: (batch, h, w, c) → logits (batch, num_classes).

    `dropout_first` drops before each hidden layer, as AlexNet does, instead of after it, as VGG does.
    """

    num_classes: int
    dropout_rate: float
    dropout_first: bool
    dtype: jnp.dtype
    width: int = 4096

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            dropout = nn.Dropout(self.dropout_rate, deterministic=not train)
            x = dropout(x) if self.dropout_first else x
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype, kernel_init=he_normal)(x))
            x = x if self.dropout_first else dropout(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)
