"""Plain deep networks: Simonyan & Zisserman, "Very Deep Convolutional Networks", arXiv 1409.1556.

Configurations A, B, D and E, without batch normalisation.
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import DropoutClassifier, adaptive_average_pool, conv, remat_if


class Stage(nn.Module):
    """3x3 convolutions, then a max-pool: (batch, h, w, c) → (batch, h / 2, w / 2, features)."""

    features: int
    convolutions: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(self.convolutions):
            x = nn.relu(conv(self.features, 3, use_bias=True, dtype=self.dtype)(x))
        return nn.max_pool(x, (2, 2), (2, 2))


class VGG(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes); `stage_sizes` counts convolutions per stage.

    `remat` wraps every stage and the classifier in `nn.remat`.
    """

    stage_sizes: Sequence[int]
    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    dropout_rate: float = 0.5
    classifier_width: int = 4096

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        stage, classifier = remat_if(self.remat, Stage), remat_if(self.remat, DropoutClassifier)
        for index, (features, size) in enumerate(zip((64, 128, 256, 512, 512), self.stage_sizes, strict=True)):
            x = stage(features, size, self.dtype, name=f"stage{index + 1}")(x, train)
        x = adaptive_average_pool(x, (7, 7))
        sizes = (self.num_classes, self.dropout_rate, False, self.dtype, self.classifier_width)
        return classifier(*sizes, name="classifier")(x, train)


VGGS = {
    "vgg11": partial(VGG, (1, 1, 2, 2, 2)),
    "vgg13": partial(VGG, (2, 2, 2, 2, 2)),
    "vgg16": partial(VGG, (2, 2, 3, 3, 3)),
    "vgg19": partial(VGG, (2, 2, 4, 4, 4)),
}
