"""AlexNet in one tower: Krizhevsky, "One weird trick for parallelizing convolutional networks", arXiv 1404.5997."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.layers import DropoutClassifier, adaptive_average_pool, conv, remat_if


class Stage(nn.Module):
    """Convolutions given as (features, kernel, stride, padding), then a 3x3 max-pool of stride 2."""

    convolutions: tuple[tuple[int, int, int, int], ...]
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features, kernel, stride, padding in self.convolutions:
            x = nn.relu(conv(features, kernel, stride, padding=padding, use_bias=True, dtype=self.dtype)(x))
        return nn.max_pool(x, (3, 3), (2, 2))


class AlexNet(nn.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes).

    `remat` wraps every stage (convolutions up to a pool) and the classifier in `nn.remat`.
    """

    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    dropout_rate: float = 0.5
    classifier_width: int = 4096

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        stage, classifier = remat_if(self.remat, Stage), remat_if(self.remat, DropoutClassifier)
        stages = (((64, 11, 4, 2),), ((192, 5, 1, 2),), ((384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1)))
        for index, convolutions in enumerate(stages):
            x = stage(convolutions, self.dtype, name=f"stage{index + 1}")(x, train)
        x = adaptive_average_pool(x, (6, 6))
        sizes = (self.num_classes, self.dropout_rate, True, self.dtype, self.classifier_width)
        return classifier(*sizes, name="classifier")(x, train)


ALEXNETS = {"alexnet": AlexNet}
