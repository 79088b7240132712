"""Steps that take gradients of gradients, of each example, or twice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, updated, with_state


class Critic(nn.Module):
    """Strided convolutions with layer normalisation, as each image is to have a gradient of its own."""

    features: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in range(4):
            x = nn.Conv(self.features * 2**stage, (4, 4), (2, 2))(x)
            x = nn.leaky_relu(nn.LayerNorm()(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


def gradient_penalty() -> Unseen:
    """A critic whose gradients between true and made images are to have length one (Gulrajani et al. 2017)."""
    model, images = Critic(), floats(32, 64, 64, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, true: jax.Array, made: jax.Array, shares: jax.Array) -> jax.Array:
        def value(x: jax.Array) -> jax.Array:
            return model.apply(params, x).sum()

        between = made + shares[:, None, None, None] * (true - made)
        lengths = jnp.sqrt(jnp.square(jax.grad(value)(between)).sum((1, 2, 3)) + 1e-12)
        difference = model.apply(params, made).mean() - model.apply(params, true).mean()
        return difference + 10.0 * jnp.square(lengths - 1.0).mean()

    return with_state(loss, params, optax.adam(1e-4, b1=0.5), images, images, floats(32))


class Solution(nn.Module):
    """A function of two coordinates."""

    features: int = 256
    depth: int = 6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.depth):
            x = nn.tanh(nn.Dense(self.features)(x))
        return nn.Dense(1)(x)[..., 0]


def differential_equation() -> Unseen:
    """Burgers' equation at points in time and space, by derivatives of the network (Raissi et al. 2019)."""
    model, points = Solution(), floats(4096, 2)
    params = jax.eval_shape(model.init, RAW_KEY, points)

    def loss(params: Any, points: jax.Array, border: jax.Array, values: jax.Array) -> jax.Array:
        def solution(time: jax.Array, place: jax.Array) -> jax.Array:
            return model.apply(params, jnp.stack([time, place]))

        def residual(point: jax.Array) -> jax.Array:
            time, place = point
            slope = jax.grad(solution, 1)
            changed = jax.grad(solution)(time, place) + solution(time, place) * slope(time, place)
            return changed - 0.003 * jax.grad(slope, 1)(time, place)

        known = jnp.square(model.apply(params, border) - values).mean()
        return jnp.square(jax.vmap(residual)(points)).mean() + known

    return with_state(loss, params, optax.adam(1e-3), points, floats(512, 2), floats(512))


class Small(nn.Module):
    """Convolutions with group normalisation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64, 128):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(features, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1))))


def private() -> Unseen:
    """Each example's gradient clipped, and noise added to their sum (Abadi et al. 2016)."""
    model, images = Small(), floats(64, 32, 32, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, image[None]), label[None])[0]

    def step(state: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        params, optimizer_state = state
        losses, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, images, labels)
        squares = sum(jnp.square(g).reshape(g.shape[0], -1).sum(1) for g in jax.tree.leaves(gradients))
        scale = jnp.minimum(1.0, 1.0 / jnp.sqrt(squares))
        leaves, tree = jax.tree.flatten(gradients)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            (jnp.einsum("n,n...->...", scale, g) + 1.1 * jax.random.normal(one, g.shape[1:])) / g.shape[0]
            for one, g in zip(keys, leaves, strict=True)
        ]
        return updated(optimizer, jax.tree.unflatten(tree, noisy), optimizer_state, params), losses.mean()

    return Unseen(step, ((params, jax.eval_shape(optimizer.init, params)), images, tokens(64), RAW_KEY))


class Residual(nn.Module):
    """Pre-activated residual blocks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3))(x)
        for stage in range(3):
            for block in range(3):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(nn.GroupNorm(8)(x))
                if x.shape[-1] != 32 * 2**stage or strides != (1, 1):
                    x = nn.Conv(32 * 2**stage, (1, 1), strides)(y)
                y = nn.relu(nn.GroupNorm(8)(nn.Conv(32 * 2**stage, (3, 3), strides)(y)))
                x = x + nn.Conv(32 * 2**stage, (3, 3))(y)
        return nn.Dense(100)(nn.relu(x).mean((1, 2)))


def sharpness_aware() -> Unseen:
    """The gradient where the first one leads uphill (Foret et al. 2021)."""
    model, images = Residual(), floats(64, 32, 32, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images), labels).mean()

    def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, optimizer_state = state
        value, gradients = jax.value_and_grad(loss)(params, images, labels)
        length = optax.global_norm(gradients)
        uphill = jax.tree.map(lambda p, g: p + 0.05 * g / (length + 1e-12), params, gradients)
        return updated(optimizer, jax.grad(loss)(uphill, images, labels), optimizer_state, params), value

    return Unseen(step, ((params, jax.eval_shape(optimizer.init, params)), images, tokens(64)))
