"""Six more, written when Fourier transforms were products to the memory model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, sinusoids, with_state


class LongConvolution(nn.Module):
    """Gates around convolutions as long as the text, by Fourier transforms (Poli et al. 2023)."""

    features: int = 192
    depth: int = 4
    words: int = 512

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        length = text.shape[1]
        x = nn.Embed(self.words, self.features)(text)
        positions = sinusoids(jnp.arange(length), 32)
        for _ in range(self.depth):
            value, *gates = jnp.split(nn.Dense(3 * self.features)(nn.LayerNorm()(x)), 3, axis=-1)
            for gate in gates:
                kernel = nn.Dense(self.features)(jnp.sin(nn.Dense(64)(positions)))
                kernel = kernel * jnp.exp(-jnp.arange(length) / length)[:, None]
                spectra = jnp.fft.rfft(value, 2 * length, axis=1) * jnp.fft.rfft(kernel, 2 * length, axis=0)
                value = gate * jnp.fft.irfft(spectra, 2 * length, axis=1)[:, :length]
            x = x + nn.Dense(self.features)(value)
            x = x + nn.Dense(self.features)(nn.gelu(nn.Dense(2 * self.features)(nn.LayerNorm()(x))))
        return nn.Dense(self.words)(nn.LayerNorm()(x))


def long_convolution() -> Unseen:
    """The next word."""
    model, text = LongConvolution(), tokens(8, 1024)
    params = jax.eval_shape(model.init, RAW_KEY, text)

    def loss(params: Any, text: jax.Array, following: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, text), following).mean()

    return with_state(loss, params, optax.adamw(1e-3), text, text)


class Mixing(nn.Module):
    """A transformer with Fourier transforms in place of attention (Lee-Thorp et al. 2022)."""

    features: int = 256
    depth: int = 6
    words: int = 1000

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(self.words, self.features)(text) + sinusoids(jnp.arange(text.shape[1]), self.features)
        for _ in range(self.depth):
            x = nn.LayerNorm()(x + jnp.fft.fft2(x).real)
            x = nn.LayerNorm()(x + nn.Dense(self.features)(nn.gelu(nn.Dense(4 * self.features)(x))))
        return nn.Dense(self.words)(x)


def mixing() -> Unseen:
    """Words that were left out."""
    model, text = Mixing(), tokens(16, 256)
    params = jax.eval_shape(model.init, RAW_KEY, text)

    def loss(params: Any, text: jax.Array, words: jax.Array, is_left_out: jax.Array) -> jax.Array:
        losses = cross_entropy(model.apply(params, text), words)
        return (losses * is_left_out).sum() / jnp.maximum(is_left_out.sum(), 1)

    return with_state(loss, params, optax.adamw(1e-3), text, text, floats(16, 256))


class Triangles(nn.Module):
    """What is known of each pair of residues, by way of a third (Jumper et al. 2021)."""

    features: int = 64
    heads: int = 4
    depth: int = 2

    @nn.compact
    def __call__(self, pairs: jax.Array) -> jax.Array:
        x = nn.Dense(self.features)(pairs)
        for _ in range(self.depth):
            for equation in ("bikc,bjkc->bijc", "bkic,bkjc->bijc"):
                y = nn.LayerNorm()(x)
                left, right = (nn.sigmoid(nn.Dense(self.features)(y)) * nn.Dense(self.features)(y) for _ in range(2))
                both = nn.LayerNorm()(jnp.einsum(equation, left, right))
                x = x + nn.sigmoid(nn.Dense(self.features)(y)) * nn.Dense(self.features)(both)
            x = x + self.attention(nn.LayerNorm()(x))
            x = x + nn.Dense(self.features)(nn.relu(nn.Dense(4 * self.features)(nn.LayerNorm()(x))))
        return nn.Dense(64)(x + x.swapaxes(1, 2))

    def attention(self, y: jax.Array) -> jax.Array:
        each = (self.heads, self.features // self.heads)
        query, key, value = (nn.DenseGeneral(each, use_bias=False)(y) for _ in range(3))
        bias = nn.Dense(self.heads, use_bias=False)(y).transpose(0, 3, 1, 2)[:, None]
        scores = jnp.einsum("bijhc,bikhc->bihjk", query, key) / each[1] ** 0.5 + bias
        found = jnp.einsum("bihjk,bikhc->bijhc", nn.softmax(scores), value)
        return nn.DenseGeneral(self.features, (-2, -1))(nn.sigmoid(nn.DenseGeneral(each)(y)) * found)


def triangles() -> Unseen:
    """How far residues lie from each other, in classes."""
    model, pairs = Triangles(), floats(2, 96, 96, 32)
    params = jax.eval_shape(model.init, RAW_KEY, pairs)

    def loss(params: Any, pairs: jax.Array, distances: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, pairs), distances).mean()

    return with_state(loss, params, optax.adam(1e-3), pairs, tokens(2, 96, 96))


class Attending(nn.Module):
    """A small decoder whose heads share keys and values (Shazeer 2019)."""

    features: int = 256
    heads: int = 4
    depth: int = 4
    words: int = 512

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        length, width = text.shape[1], self.features // self.heads
        x = nn.Embed(self.words, self.features)(text)
        is_before = jnp.tril(jnp.ones((length, length), bool))
        for _ in range(self.depth):
            y = nn.RMSNorm()(x)
            query = nn.Dense(self.features, use_bias=False)(y).reshape(*y.shape[:2], self.heads, width)
            key, value = (nn.Dense(width, use_bias=False)(y) for _ in range(2))
            scores = jnp.einsum("bqhc,bkc->bhqk", query, key) / width**0.5
            shares = nn.softmax(jnp.where(is_before, scores, -1e9))
            found = jnp.einsum("bhqk,bkc->bqhc", shares, value).reshape(y.shape)
            x = x + nn.Dense(self.features, use_bias=False)(found)
            y = nn.Dense(4 * self.features, use_bias=False)(nn.RMSNorm()(x))
            x = x + nn.Dense(self.features, use_bias=False)(jnp.square(nn.relu(y)))
        return nn.Dense(self.words, use_bias=False)(nn.RMSNorm()(x))


def orthogonalised() -> Unseen:
    """The next word, with updates of matrices that are made orthogonal by polynomials of them (Jordan et al. 2024)."""
    model, text = Attending(), tokens(8, 256)
    params = jax.eval_shape(model.init, RAW_KEY, text)

    def as_orthogonal(matrix: jax.Array) -> jax.Array:
        x = matrix / (jnp.linalg.norm(matrix) + 1e-7)
        x = x.T if matrix.shape[0] > matrix.shape[1] else x
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    def loss(params: Any, text: jax.Array, following: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, text), following).mean()

    def step(state: tuple[Any, Any], text: jax.Array, following: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, momenta = state
        value, gradients = jax.value_and_grad(loss)(params, text, following)
        momenta = jax.tree.map(lambda m, g: 0.95 * m + g, momenta, gradients)
        updates = jax.tree.map(lambda m: as_orthogonal(m) if m.ndim == 2 else m, momenta)
        return (jax.tree.map(lambda p, u: p - 0.02 * u, params, updates), momenta), value

    return Unseen(step, ((params, params), text, text))


def equilibrium() -> Unseen:
    """Images, by what a layer makes of its own result until that stays the same (Bai et al. 2020): gradients are
    those of the fixed point."""
    features, images = 48, floats(32, 32, 32, 3)
    layer = nn.Sequential([nn.Conv(features, (3, 3)), nn.GroupNorm(8), nn.relu, nn.Conv(features, (3, 3))])
    given, last = nn.Conv(features, (3, 3)), nn.Dense(10)
    inner = jax.ShapeDtypeStruct((*images.shape[:3], features), jnp.float32)
    params = (
        jax.eval_shape(given.init, RAW_KEY, images),
        jax.eval_shape(layer.init, RAW_KEY, inner),
        jax.eval_shape(last.init, RAW_KEY, jax.ShapeDtypeStruct((images.shape[0], features), jnp.float32)),
    )

    def once(params: Any, x: jax.Array, z: jax.Array) -> jax.Array:
        return nn.relu(x + layer.apply(params, z))

    def repeated(function: Any, z: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 12, lambda _, z: function(z), z)

    @jax.custom_vjp
    def fixed(params: Any, x: jax.Array) -> jax.Array:
        return repeated(lambda z: once(params, x, z), jnp.zeros_like(x))

    def forward(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        z = fixed(params, x)
        return z, (params, x, z)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[Any, jax.Array]:
        params, x, z = kept
        _, of_z = jax.vjp(lambda z: once(params, x, z), z)
        solved = repeated(lambda g: cotangent + of_z(g)[0], cotangent)
        return jax.vjp(lambda params, x: once(params, x, z), params, x)[1](solved)

    fixed.defvjp(forward, backward)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        z = fixed(params[1], given.apply(params[0], images))
        return cross_entropy(last.apply(params[2], z.mean((1, 2))), labels).mean()

    return with_state(loss, params, optax.adam(1e-3), images, tokens(32))


class Dreaming(nn.Module):
    """A state that a recurrent cell carries on, and noise, from which frames are made again (Hafner et al. 2020)."""

    features: int = 256
    noise: int = 32

    @nn.compact
    def __call__(self, frames: jax.Array, actions: jax.Array, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = frames
        for features in (32, 64, 128):
            x = nn.relu(nn.Conv(features, (4, 4), (2, 2))(x))
        seen = nn.Dense(self.features)(x.reshape(*frames.shape[:2], -1))
        cell = nn.scan(_Dreamt, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        first = jnp.zeros((frames.shape[0], self.features)), jnp.zeros((frames.shape[0], self.noise))
        _, (states, divergences) = cell(self.features, self.noise)(first, (seen, actions, draws))
        x = nn.Dense(8 * 8 * 128)(states).reshape(*states.shape[:2], 8, 8, 128)
        for features in (64, 32):
            x = nn.relu(nn.ConvTranspose(features, (4, 4), (2, 2))(x))
        return nn.ConvTranspose(3, (4, 4), (2, 2))(x), divergences


class _Dreamt(nn.Module):
    features: int
    noise: int

    @nn.compact
    def __call__(self, carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        (state, sample), (seen, action, draw) = carry, given
        state, _ = nn.GRUCell(self.features)(
            state, nn.elu(nn.Dense(self.features)(jnp.concatenate([sample, action], -1)))
        )
        mean, spread = jnp.split(nn.Dense(2 * self.noise)(nn.elu(nn.Dense(self.features)(state))), 2, axis=-1)
        both = nn.elu(nn.Dense(self.features)(jnp.concatenate([state, seen], -1)))
        found, width = jnp.split(nn.Dense(2 * self.noise)(both), 2, axis=-1)
        spread, width = nn.softplus(spread) + 0.1, nn.softplus(width) + 0.1
        divergence = jnp.log(spread / width) + (jnp.square(width) + jnp.square(found - mean)) / (2 * jnp.square(spread))
        sample = found + width * draw
        return (state, sample), (jnp.concatenate([state, sample], -1), divergence.sum(-1))


def dreaming() -> Unseen:
    """Frames again, and states that can be told beforehand."""
    model = Dreaming()
    frames, actions, draws = floats(8, 16, 64, 64, 3), floats(8, 16, 6), floats(8, 16, 32)
    params = jax.eval_shape(model.init, RAW_KEY, frames, actions, draws)

    def loss(params: Any, frames: jax.Array, actions: jax.Array, draws: jax.Array) -> jax.Array:
        again, divergences = model.apply(params, frames, actions, draws)
        return jnp.square(again - frames).sum((2, 3, 4)).mean() + jnp.maximum(divergences, 1.0).mean()

    return with_state(loss, params, optax.adam(3e-4), frames, actions, draws)
