"""Inception v3: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", arXiv 1512.00567.

Without the auxiliary classifier. The sizes inside the blocks, which the paper leaves open, are those of its authors'
released network. No branch pads where it strides, so that 299 and 300 pixels both end in maps of 8x8.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import batch_norm, conv, padded_average_pool, remat_if

Kernel = int | tuple[int, int]


class ConvNorm(nn.Module):
    """Convolution, batch norm, relu: (batch, h, w, c) → (batch, h', w', features)."""

    features: int
    kernel: Kernel
    dtype: jnp.dtype
    stride: int = 1
    padding: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = conv(self.features, self.kernel, self.stride, padding=self.padding, dtype=self.dtype)(x)
        return nn.relu(batch_norm(train, epsilon=1e-3, dtype=self.dtype)(x))


class Block(nn.Module):
    """Branches of convolutions next to each other, joined by channels; what the kinds of blocks share."""

    dtype: jnp.dtype

    def branch(self, x: jax.Array, train: bool, *layers: tuple[int, Kernel]) -> jax.Array:
        """Convolutions that keep the size, each (features, kernel), one after the other."""
        for features, kernel in layers:
            x = ConvNorm(features, kernel, self.dtype)(x, train)
        return x

    def halved(self, x: jax.Array, train: bool, features: int) -> jax.Array:
        """A 3x3 convolution of stride 2 without padding."""
        return ConvNorm(features, 3, self.dtype, stride=2, padding=0)(x, train)


class BlockA(Block):
    """Branches 1x1, 5x5, two 3x3 and a pool (figure 5): → (batch, h, w, 224 + pool_features)."""

    pool_features: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        branches = [
            self.branch(x, train, (64, 1)),
            self.branch(x, train, (48, 1), (64, 5)),
            self.branch(x, train, (64, 1), (96, 3), (96, 3)),
            self.branch(padded_average_pool(x, count_padding=True), train, (self.pool_features, 1)),
        ]
        return jnp.concatenate(branches, -1)


class ReductionA(Block):
    """Halves the maps of the A blocks (figure 10): (batch, h, w, c) → (batch, h / 2, w / 2, 480 + c)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        direct = self.halved(x, train, 384)
        deep = self.halved(self.branch(x, train, (64, 1), (96, 3)), train, 96)
        return jnp.concatenate([direct, deep, nn.max_pool(x, (3, 3), (2, 2))], -1)


class BlockB(Block):
    """Branches of 7x7 convolutions, each split into 1x7 and 7x1 (figure 6): → (batch, h, w, 768)."""

    width: int = 192

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        c, row, column = self.width, (1, 7), (7, 1)
        branches = [
            self.branch(x, train, (192, 1)),
            self.branch(x, train, (c, 1), (c, row), (192, column)),
            self.branch(x, train, (c, 1), (c, column), (c, row), (c, column), (192, row)),
            self.branch(padded_average_pool(x, count_padding=True), train, (192, 1)),
        ]
        return jnp.concatenate(branches, -1)


class ReductionB(Block):
    """Halves the maps of the B blocks: (batch, h, w, c) → (batch, h / 2, w / 2, 512 + c)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        direct = self.halved(self.branch(x, train, (192, 1)), train, 320)
        deep = self.halved(self.branch(x, train, (192, 1), (192, (1, 7)), (192, (7, 1))), train, 192)
        return jnp.concatenate([direct, deep, nn.max_pool(x, (3, 3), (2, 2))], -1)


class BlockC(Block):
    """Branches that end in 1x3 and 3x1 side by side (figure 7): → (batch, h, w, 2048)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        shallow = self.branch(x, train, (384, 1))
        deep = self.branch(x, train, (448, 1), (384, 3))
        branches = [self.branch(x, train, (320, 1))]
        branches += [self.branch(y, train, (384, kernel)) for y in (shallow, deep) for kernel in ((1, 3), (3, 1))]
        branches.append(self.branch(padded_average_pool(x, count_padding=True), train, (192, 1)))
        return jnp.concatenate(branches, -1)


class InceptionV3(nn.Module):
    """Images (batch, height, width, 3), sides of at least 75 pixels → logits (batch, num_classes).

    `remat` wraps the stem and every block in `nn.remat`. The fields below `dropout_rate` give the blocks of each kind.
    """

    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    dropout_rate: float = 0.5
    pool_features: Sequence[int] = (32, 64, 64)
    widths: Sequence[int] = (128, 160, 160, 192)
    blocks_c: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def block(kind: type[nn.Module], name: str, **sizes: int) -> nn.Module:
            return remat_if(self.remat, kind)(dtype=self.dtype, name=name, **sizes)

        if min(x.shape[1:3]) < 75:
            raise ValueError(f"expected images with sides of at least 75 pixels, got {x.shape[1:3]}")
        x = block(Stem, "stem")(x, train)
        for index, features in enumerate(self.pool_features):
            x = block(BlockA, f"a{index + 1}", pool_features=features)(x, train)
        x = block(ReductionA, "reduction_a")(x, train)
        for index, width in enumerate(self.widths):
            x = block(BlockB, f"b{index + 1}", width=width)(x, train)
        x = block(ReductionB, "reduction_b")(x, train)
        for index in range(self.blocks_c):
            x = block(BlockC, f"c{index + 1}")(x, train)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x)


class Stem(nn.Module):
    """Five convolutions and two pools, at an eighth of the size: (batch, h, w, 3) → (batch, h / 8, w / 8, 192)."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = ConvNorm(32, 3, self.dtype, stride=2, padding=0)(x, train)
        x = ConvNorm(32, 3, self.dtype, padding=0)(x, train)
        x = ConvNorm(64, 3, self.dtype)(x, train)
        x = nn.max_pool(x, (3, 3), (2, 2))
        x = ConvNorm(80, 1, self.dtype)(x, train)
        x = ConvNorm(192, 3, self.dtype, padding=0)(x, train)
        return nn.max_pool(x, (3, 3), (2, 2))


INCEPTIONS = {"inception_v3": InceptionV3}
