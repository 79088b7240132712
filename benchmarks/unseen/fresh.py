"""Six more, written when images beside products lay as images to the memory model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, with_state


class Shuffled(nn.Module):
    """Convolutions in groups, between which features change places (Zhang et al. 2018)."""

    groups: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def normalised(y: jax.Array) -> jax.Array:
            mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
            return (y - mean) * jax.lax.rsqrt(variance + 1e-5)

        x = nn.relu(normalised(nn.Conv(64, (3, 3), (2, 2), use_bias=False)(x)))
        for features, depth in ((128, 3), (256, 4)):
            for at in range(depth):
                stride = 2 if at == 0 else 1
                width = features // 4
                y = nn.Conv(width, (1, 1), feature_group_count=self.groups, use_bias=False)(x)
                y = nn.relu(normalised(y))
                y = y.reshape(*y.shape[:3], self.groups, width // self.groups).swapaxes(3, 4).reshape(y.shape)
                y = nn.Conv(width, (3, 3), (stride, stride), feature_group_count=width, use_bias=False)(y)
                made = features - x.shape[-1] if at == 0 else features
                y = normalised(nn.Conv(made, (1, 1), feature_group_count=self.groups, use_bias=False)(normalised(y)))
                if at == 0:
                    x = nn.relu(jnp.concatenate([nn.avg_pool(x, (3, 3), (2, 2), "SAME"), y], -1))
                else:
                    x = nn.relu(x + y)
        return nn.Dense(100)(x.mean((1, 2)))


def shuffled() -> Unseen:
    """Classes of pictures."""
    model, images = Shuffled(), floats(64, 96, 96, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, images: jax.Array, classes: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images), classes).mean()

    return with_state(loss, params, optax.sgd(0.1, momentum=0.9), images, tokens(64))


class MaskedConv(nn.Module):
    """A convolution of which each place sees those before it."""

    features: int
    sees_itself: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = np.ones((3, 3, 1, 1), np.float32)
        mask[2], mask[1, 2], mask[1, 1] = 0, 0, self.sees_itself
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (3, 3, x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel * mask, (1, 1), "SAME", dimension_numbers=numbers) + bias


class Pixels(nn.Module):
    """Each pixel of those before it: convolutions with half of their filters, and gates (van den Oord et al. 2016)."""

    features: int = 64
    depth: int = 6
    levels: int = 64

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = MaskedConv(self.features, sees_itself=False)(images)
        for _ in range(self.depth):
            y = MaskedConv(2 * self.features, sees_itself=True)(nn.relu(x))
            signal, gate = jnp.split(y, 2, -1)
            x = x + nn.Conv(self.features, (1, 1))(jnp.tanh(signal) * nn.sigmoid(gate))
        return nn.Conv(self.levels, (1, 1))(nn.relu(nn.Conv(128, (1, 1))(nn.relu(x))))


def pixels() -> Unseen:
    """How bright each pixel is, of 64 levels."""
    model, images = Pixels(), floats(32, 32, 32, 1)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, images: jax.Array, levels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images), levels).mean()

    return with_state(loss, params, optax.adam(1e-3), images, tokens(32, 32, 32))


class Modulated(nn.Module):
    """A convolution with filters of each example's own: features are scaled before and behind (Karras et al. 2020)."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, style: jax.Array) -> jax.Array:
        scale = 1.0 + nn.Dense(x.shape[-1])(style)
        kernel = self.param("kernel", nn.initializers.normal(0.05), (3, 3, x.shape[-1], self.features))
        own = kernel[None] * scale[:, None, None, :, None]
        length = jax.lax.rsqrt((own**2).sum((1, 2, 3)) + 1e-8)
        x = x * scale[:, None, None, :]
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return nn.leaky_relu(x * length[:, None, None, :], 0.2)


class Generator(nn.Module):
    """Pictures of a style, with noise at each resolution."""

    @nn.compact
    def __call__(self, latent: jax.Array, key: jax.Array) -> jax.Array:
        style = latent
        for _ in range(3):
            style = nn.leaky_relu(nn.Dense(128)(style), 0.2)
        first = self.param("first", nn.initializers.normal(), (8, 8, 128))
        x, painted = jnp.broadcast_to(first, (latent.shape[0], *first.shape)), 0.0
        for at, features in enumerate((128, 128, 64, 32)):
            if at:
                batch, size = x.shape[0], 2 * x.shape[1]
                x = jax.image.resize(x, (batch, size, size, x.shape[-1]), "bilinear")
                painted = jax.image.resize(painted, (batch, size, size, 3), "bilinear")
            for turn in range(2):
                x = Modulated(features)(x, style)
                noise = jax.random.normal(jax.random.fold_in(key, 2 * at + turn), (*x.shape[:3], 1))
                x = x + noise * self.param(f"noise_{at}_{turn}", nn.initializers.zeros, ())
            painted = painted + nn.Conv(3, (1, 1))(x)
        return painted


class Critic(nn.Module):
    """Whether a picture is real."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64, 128):
            y = nn.leaky_relu(nn.Conv(features, (3, 3))(nn.leaky_relu(nn.Conv(features, (3, 3))(x), 0.2)), 0.2)
            x = nn.avg_pool(y + nn.Conv(features, (1, 1), use_bias=False)(x), (2, 2), (2, 2))
        return nn.Dense(1)(nn.leaky_relu(nn.Dense(128)(x.reshape(x.shape[0], -1)), 0.2))


def modulated() -> Unseen:
    """A generator against a critic that is not trained in this step."""
    generator, critic, latent = Generator(), Critic(), floats(16, 128)
    params = jax.eval_shape(generator.init, RAW_KEY, latent, RAW_KEY)
    frozen = jax.eval_shape(critic.init, RAW_KEY, floats(16, 64, 64, 3))

    def loss(params: Any, frozen: Any, latent: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean(nn.softplus(-critic.apply(frozen, generator.apply(params, latent, key))))

    return with_state(loss, params, optax.adam(2e-3), frozen, latent, RAW_KEY)


class Board(nn.Module):
    """Moves and the winner of a position on a board of 19 × 19 (Silver et al. 2017)."""

    features: int = 96
    depth: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def normalised(y: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False)(y)

        x = nn.relu(normalised(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
        for _ in range(self.depth):
            y = nn.relu(normalised(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
            x = nn.relu(x + normalised(nn.Conv(self.features, (3, 3), use_bias=False)(y)))
        moves = nn.relu(normalised(nn.Conv(2, (1, 1))(x))).reshape(x.shape[0], -1)
        winner = nn.relu(normalised(nn.Conv(1, (1, 1))(x))).reshape(x.shape[0], -1)
        return nn.Dense(362)(moves), jnp.tanh(nn.Dense(1)(nn.relu(nn.Dense(256)(winner))))[:, 0]


def board() -> Unseen:
    """What a search found: how often each move was tried, and who won."""
    model, positions = Board(), floats(256, 19, 19, 17)
    variables = jax.eval_shape(model.init, RAW_KEY, positions)
    statistics = variables["batch_stats"]

    def loss(params: Any, statistics: Any, positions: jax.Array, tried: jax.Array, won: jax.Array) -> jax.Array:
        variables = {"params": params, "batch_stats": statistics}
        (moves, winner), _ = model.apply(variables, positions, mutable=["batch_stats"])
        decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        return optax.softmax_cross_entropy(moves, tried).mean() + jnp.mean((winner - won) ** 2) + 1e-4 * decay

    batch = statistics, positions, floats(256, 362), floats(256)
    return with_state(loss, variables["params"], optax.sgd(0.01, momentum=0.9), *batch)


class Reader(nn.Module):
    """Sentences read from both ends; each word of the translation looks at all of that (Bahdanau et al. 2015)."""

    words: int = 4000
    features: int = 256

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embedded = nn.Embed(self.words, self.features)(source)
        forward = nn.RNN(nn.GRUCell(self.features))(embedded)
        backward = nn.RNN(nn.GRUCell(self.features), reverse=True, keep_order=True)(embedded)
        seen = jnp.concatenate([forward, backward], -1)
        keys = nn.Dense(self.features)(seen)
        made = nn.scan(
            Writer,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=(nn.broadcast, nn.broadcast, 1),
            out_axes=1,
        )(self.features)
        carry = jnp.zeros((source.shape[0], self.features))
        _, written = made(carry, seen, keys, nn.Embed(self.words, self.features)(target))
        return nn.Dense(self.words)(written)


class Writer(nn.Module):
    """One word."""

    features: int

    @nn.compact
    def __call__(
        self, carry: jax.Array, seen: jax.Array, keys: jax.Array, word: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        scores = nn.Dense(1)(jnp.tanh(keys + nn.Dense(self.features)(carry)[:, None]))[..., 0]
        context = jnp.einsum("bs,bsf->bf", nn.softmax(scores), seen)
        carry, _ = nn.GRUCell(self.features)(carry, jnp.concatenate([word, context], -1))
        return carry, jnp.tanh(nn.Dense(self.features)(jnp.concatenate([carry, context], -1)))


def looking_back() -> Unseen:
    """The next word of a translation."""
    model, text = Reader(), tokens(32, 48)
    params = jax.eval_shape(model.init, RAW_KEY, text, text)

    def loss(params: Any, source: jax.Array, target: jax.Array, following: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, source, target), following).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return with_state(loss, params, optimizer, text, text, text)


class Capsules(nn.Module):
    """Small vectors that agree on what they are parts of (Sabour et al. 2017)."""

    classes: int = 10
    turns: int = 3

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        def squashed(x: jax.Array) -> jax.Array:
            length = jnp.sum(x**2, -1, keepdims=True)
            return length / (1.0 + length) * x * jax.lax.rsqrt(length + 1e-8)

        x = nn.relu(nn.Conv(128, (9, 9), padding="VALID")(images))
        x = nn.Conv(128, (9, 9), (2, 2), padding="VALID")(x)
        parts = squashed(x.reshape(x.shape[0], -1, 8))
        kernel = self.param("kernel", nn.initializers.normal(0.1), (parts.shape[1], self.classes, 8, 16))
        votes = jnp.einsum("bpi,pcio->bpco", parts, kernel)
        scores = jnp.zeros(votes.shape[:3])
        for turn in range(self.turns):
            wholes = squashed(jnp.einsum("bpc,bpco->bco", nn.softmax(scores, -1), votes))
            if turn < self.turns - 1:
                scores = scores + jnp.einsum("bpco,bco->bpc", votes, wholes)
        return jnp.sqrt(jnp.sum(wholes**2, -1) + 1e-8)


def capsules() -> Unseen:
    """Digits."""
    model, images = Capsules(), floats(64, 28, 28, 1)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, images: jax.Array, classes: jax.Array) -> jax.Array:
        lengths, own = model.apply(params, images), jax.nn.one_hot(classes, 10)
        missing, wrong = nn.relu(0.9 - lengths) ** 2, nn.relu(lengths - 0.1) ** 2
        return (own * missing + 0.5 * (1 - own) * wrong).sum(-1).mean()

    return with_state(loss, params, optax.adam(1e-3), images, tokens(64))
