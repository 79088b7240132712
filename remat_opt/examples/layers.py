"""Layers that several image networks share. All images are NHWC: (batch, height, width, channels)."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")  # He et al., arXiv 1502.01852


def remat_if(remat: bool, block: type[nn.Module]) -> type[nn.Module]:
    """`block`, wrapped in `nn.remat` if asked; its `__call__(x, train)` then needs `train` by position.

    `nn.remat` renames the class, so give the block a name for the same parameter tree with and without.
    """
    return nn.remat(block, static_argnums=(2,)) if remat else block


def conv(
    features: int,
    kernel: int,
    stride: int = 1,
    *,
    dtype: jnp.dtype,
    padding: int | None = None,
    use_bias: bool = False,
    name: str | None = None,
) -> nn.Conv:
    """Square convolution with symmetric padding, by default kernel // 2."""
    pad = kernel // 2 if padding is None else padding
    return nn.Conv(
        features,
        (kernel, kernel),
        (stride, stride),
        padding=[(pad, pad), (pad, pad)],
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=he_normal,
        name=name,
    )


def batch_norm(train: bool, *, dtype: jnp.dtype, name: str | None = None) -> nn.BatchNorm:
    """Batch normalisation (Ioffe & Szegedy, arXiv 1502.03167), with batch statistics while training."""
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=dtype, name=name)


def padded_max_pool(x: jax.Array) -> jax.Array:
    """3x3 maximum with stride 2 and padding 1: (batch, h, w, c) → (batch, h / 2, w / 2, c)."""
    padding = ((1, 1), (1, 1))
    return nn.max_pool(x, (3, 3), (2, 2), padding=padding)  # pyright: ignore[reportArgumentType]  (annotated as str)


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
