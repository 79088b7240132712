"""The residual networks of `resnet.py` in Flax nnx: the same layers, strides and initialisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from remat_opt.examples.layers import he_normal, padded_max_pool


def conv(inputs: int, features: int, kernel: int, stride: int = 1, *, rngs: nnx.Rngs) -> nnx.Conv:
    """Square convolution with symmetric padding, kernel // 2, and no bias."""
    pad = kernel // 2
    return nnx.Conv(
        inputs,
        features,
        (kernel, kernel),
        (stride, stride),
        padding=[(pad, pad), (pad, pad)],
        use_bias=False,
        kernel_init=he_normal,
        rngs=rngs,
    )


def batch_norm(features: int, *, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Batch normalisation, with batch statistics while training."""
    return nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, rngs=rngs)


class BottleneckBlock(nnx.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut: (batch, h, w, inputs) → (batch, h / stride, w / stride, 4 * width)."""

    def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs):
        features = 4 * width
        self.reduce, self.reduce_norm = conv(inputs, width, 1, rngs=rngs), batch_norm(width, rngs=rngs)
        self.middle, self.middle_norm = conv(width, width, 3, stride, rngs=rngs), batch_norm(width, rngs=rngs)
        self.expand, self.expand_norm = conv(width, features, 1, rngs=rngs), batch_norm(features, rngs=rngs)
        self.projected = stride != 1 or inputs != features
        if self.projected:
            self.projection = conv(inputs, features, 1, stride, rngs=rngs)
            self.projection_norm = batch_norm(features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.reduce_norm(self.reduce(x)))
        y = nnx.relu(self.middle_norm(self.middle(y)))
        y = self.expand_norm(self.expand(y))
        shortcut = self.projection_norm(self.projection(x)) if self.projected else x
        return nnx.relu(y + shortcut)


class ResNet(nnx.Module):
    """Images (batch, height, width, 3) → logits (batch, num_classes); `stage_sizes` counts the blocks per stage."""

    def __init__(self, stage_sizes: Sequence[int], *, num_classes: int = 1000, width: int = 64, rngs: nnx.Rngs):
        self.stem, self.stem_norm = conv(3, width, 7, 2, rngs=rngs), batch_norm(width, rngs=rngs)
        features, blocks = width, []
        for stage, size in enumerate(stage_sizes):
            for index in range(size):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(BottleneckBlock(features, width * 2**stage, stride, rngs=rngs))
                features = 4 * width * 2**stage
        self.blocks = nnx.List(blocks)
        self.classifier = nnx.Linear(features, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = padded_max_pool(nnx.relu(self.stem_norm(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean((1, 2)))


resnet50 = partial(ResNet, (3, 4, 6, 3))


def cross_entropy(model: nnx.Module, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of a classifier; its batch statistics are updated."""
    logits = model(images).astype(jnp.float32)  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classifier_step(
    make: Callable[..., nnx.Module],
    remat: Callable[[Callable], Callable] = lambda loss: loss,
    learning_rate: float = 0.1,
) -> tuple[Callable[..., tuple[Any, jax.Array]], Any]:
    """A training step of an nnx classifier with SGD and momentum, and the shapes of its state. Nothing is allocated.

    Args:
        make: makes the network from `rngs`.
        remat: what the loss of the model is wrapped in.
        learning_rate: of the optimizer.

    Returns:
        `train_step(state, images, labels)`, a function of arrays that gives the new state and the loss; and the state,
        that of the model and its optimizer.
    """

    def make_both():
        model = make(rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(learning_rate, momentum=0.9), wrt=nnx.Param)

    graph, abstract_state = nnx.split(nnx.eval_shape(make_both))
    loss_of_model = remat(cross_entropy)

    def train_step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state, copy=True)
        loss, grads = nnx.value_and_grad(loss_of_model)(model, images, labels)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return train_step, abstract_state
