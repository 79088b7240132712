"""Three more, written when rows' maxima were windows to the memory model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.held_out import floats
from benchmarks.unseen.step import RAW_KEY, Unseen, with_state


def each_image_normalised(x: jax.Array) -> jax.Array:
    """Each image and feature with mean 0 and variance 1 (Ulyanov et al. 2016)."""
    mean, variance = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


class Painter(nn.Module):
    """Strided convolutions, residual blocks, and convolutions of images made larger (Johnson et al. 2016)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, stride in ((32, 1), (64, 2), (128, 2)):
            x = nn.relu(each_image_normalised(nn.Conv(features, (3, 3), (stride, stride))(x)))
        for _ in range(4):
            y = nn.relu(each_image_normalised(nn.Conv(128, (3, 3))(x)))
            x = x + each_image_normalised(nn.Conv(128, (3, 3))(y))
        for features in (64, 32):
            batch, height, width, _ = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * width, x.shape[-1]), "nearest")
            x = nn.relu(each_image_normalised(nn.Conv(features, (3, 3))(x)))
        return nn.tanh(nn.Conv(3, (9, 9))(x))


class Viewer(nn.Module):
    """What is compared of two images: features of three stages."""

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        found = []
        for features in (64, 128, 256):
            x = nn.relu(nn.Conv(features, (3, 3))(nn.relu(nn.Conv(features, (3, 3))(x))))
            found.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        return found


def style() -> Unseen:
    """Pictures in a style: the features of a network that is not trained, and their products with each other."""
    painter, viewer, images = Painter(), Viewer(), floats(8, 128, 128, 3)
    params, frozen = jax.eval_shape(painter.init, RAW_KEY, images), jax.eval_shape(viewer.init, RAW_KEY, images)

    def correlations(x: jax.Array) -> jax.Array:
        places = x.shape[1] * x.shape[2]
        return jnp.einsum("bhwc,bhwd->bcd", x, x) / places

    def loss(params: Any, frozen: Any, images: jax.Array, model: jax.Array) -> jax.Array:
        painted = painter.apply(params, images)
        seen, wanted, styles = (viewer.apply(frozen, x) for x in (painted, images, model))
        content = jnp.mean((seen[1] - wanted[1]) ** 2)
        styled = sum(jnp.mean((correlations(x) - correlations(y)) ** 2) for x, y in zip(seen, styles, strict=True))
        smooth = jnp.mean(jnp.abs(painted[:, 1:] - painted[:, :-1])) + jnp.mean(
            jnp.abs(painted[:, :, 1:] - painted[:, :, :-1])
        )
        return content + 10.0 * styled + 0.1 * smooth

    return with_state(loss, params, optax.adam(1e-3), frozen, images, floats(1, 128, 128, 3))


class Slots(nn.Module):
    """Objects of an image, for which its places compete (Locatello et al. 2020)."""

    slots: int = 7
    features: int = 64
    turns: int = 3

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for _ in range(4):
            x = nn.relu(nn.Conv(self.features, (5, 5))(x))
        batch, height, width, _ = x.shape
        places = self.param("places", nn.initializers.normal(), (height, width, self.features))
        x = nn.LayerNorm()((x + places).reshape(batch, height * width, self.features))
        keys, values = nn.Dense(self.features)(x), nn.Dense(self.features)(x)
        slots = jnp.broadcast_to(
            self.param("slots", nn.initializers.normal(), (self.slots, self.features)),
            (batch, self.slots, self.features),
        )
        cell, query = nn.GRUCell(self.features), nn.Dense(self.features)
        for _ in range(self.turns):
            scores = jnp.einsum("bsc,bpc->bps", query(nn.LayerNorm()(slots)), keys) / self.features**0.5
            shares = nn.softmax(scores, -1) + 1e-8
            shares = shares / shares.sum(1, keepdims=True)
            slots, _ = cell(slots, jnp.einsum("bps,bpc->bsc", shares, values))
            slots = slots + nn.Dense(self.features)(nn.relu(nn.Dense(2 * self.features)(nn.LayerNorm()(slots))))
        spread = jnp.broadcast_to(
            slots.reshape(-1, 1, 1, self.features), (batch * self.slots, height, width, self.features)
        )
        y = spread + self.param("grid", nn.initializers.normal(), (height, width, self.features))
        for _ in range(3):
            y = nn.relu(nn.Conv(self.features, (5, 5))(y))
        y = nn.Conv(4, (3, 3))(y).reshape(batch, self.slots, height, width, 4)
        return (y[..., :3] * nn.softmax(y[..., 3:], 1)).sum(1)


def objects() -> Unseen:
    """Images, put together of their objects."""
    model, images = Slots(), floats(16, 48, 48, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, images: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(params, images) - images) ** 2)

    return with_state(loss, params, optax.adam(4e-4), images)


class Automaton(nn.Module):
    """One step of all cells, of which each sees its neighbours and half are asleep (Mordvintsev et al. 2020)."""

    features: int = 16

    @nn.compact
    def __call__(self, cells: jax.Array, key: jax.Array) -> jax.Array:
        seen = nn.Conv(3 * self.features, (3, 3), feature_group_count=self.features, use_bias=False)(cells)
        change = nn.Dense(self.features, use_bias=False)(nn.relu(nn.Dense(128)(seen)))
        awake = jax.random.bernoulli(key, 0.5, (*cells.shape[:3], 1))
        alive = nn.max_pool(cells[..., 3:4], (3, 3), padding="SAME") > 0.1
        return (cells + change * awake) * alive


def automaton() -> Unseen:
    """Cells that grow into pictures in 48 steps."""
    model, cells, pictures = Automaton(), floats(8, 64, 64, 16), floats(8, 64, 64, 4)
    params = jax.eval_shape(model.init, RAW_KEY, cells, RAW_KEY)

    def loss(params: Any, cells: jax.Array, pictures: jax.Array, key: jax.Array) -> jax.Array:
        def step(cells: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return model.apply(params, cells, key), None

        grown, _ = jax.lax.scan(step, cells, jax.random.split(key, 48))
        return jnp.mean((grown[..., :4] - pictures) ** 2)

    return with_state(loss, params, optax.adam(2e-3), cells, pictures, RAW_KEY)
