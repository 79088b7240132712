"""Eleven steps over images, signals and equations, and with gradients of gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, floats, sinusoids, tokens, updated, with_state


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


class WaveNet(nn.Module):
    """Gated causal convolutions of growing dilation (van den Oord et al. 2016)."""

    features: int = 64
    skipped: int = 128
    depth: int = 8

    @nn.compact
    def __call__(self, samples: jax.Array) -> jax.Array:
        x = nn.Embed(256, self.features)(samples)
        total: Any = 0.0
        for number in range(self.depth):
            dilated = nn.Conv(2 * self.features, (2,), kernel_dilation=(2**number,), padding="CAUSAL")
            signal, gate = jnp.split(dilated(x), 2, -1)
            y = jnp.tanh(signal) * nn.sigmoid(gate)
            total = total + nn.Dense(self.skipped)(y)
            x = x + nn.Dense(self.features)(y)
        return nn.Dense(256)(nn.relu(nn.Dense(self.skipped)(nn.relu(total))))


def wavenet() -> Unseen:
    """Sound, sample by sample, in Flax's `TrainState`."""
    model, samples = WaveNet(), tokens(8, 2048)

    def step(state: TrainState, samples: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn(params, samples[:, :-1]), samples[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    def initial(key: jax.Array, samples: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=model.init(key, samples), tx=optax.adam(1e-3))

    return Unseen(step, (jax.eval_shape(initial, RAW_KEY, samples), samples))


def neural_ode() -> Unseen:
    """A neural ordinary differential equation (Chen et al. 2018), by Runge-Kutta steps in a scan."""
    features, hidden, steps = 32, 128, 24
    size = 1 / steps

    def slope(params: Any, time: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.concatenate([x, jnp.full((x.shape[0], 1), time)], -1)
        x = jax.nn.softplus(x @ params["weight1"] + params["bias1"])
        return jnp.tanh(x @ params["weight2"] + params["bias2"]) @ params["weight3"]

    def loss(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        def advance(x: jax.Array, time: jax.Array) -> tuple[jax.Array, None]:
            first = slope(params, time, x)
            second = slope(params, time + size / 2, x + size / 2 * first)
            third = slope(params, time + size / 2, x + size / 2 * second)
            fourth = slope(params, time + size, x + size * third)
            return x + size / 6 * (first + 2 * second + 2 * third + fourth), None

        x, _ = jax.lax.scan(advance, inputs @ params["read_in"], jnp.arange(steps) * size)
        return cross_entropy(x @ params["read_out"], labels).mean()

    params = {
        "read_in": floats(features, features),
        "weight1": floats(features + 1, hidden),
        "bias1": floats(hidden),
        "weight2": floats(hidden, hidden),
        "bias2": floats(hidden),
        "weight3": floats(hidden, features),
        "read_out": floats(features, 10),
    }
    return with_state(loss, params, optax.adam(1e-3), floats(2048, features), tokens(2048))


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


class FourierOperator(nn.Module):
    """Layers that multiply low frequencies, for fields on a grid (Li et al. 2021)."""

    features: int = 32
    modes: int = 12
    depth: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.features)(x)
        for layer in range(self.depth):
            shape = (self.modes, self.modes, self.features, self.features)
            real, imaginary = (
                self.param(f"{part}{layer}", nn.initializers.normal(0.02), shape) for part in ("re", "im")
            )
            found = jnp.fft.rfft2(x, axes=(1, 2))[:, : self.modes, : self.modes]
            found = jnp.einsum("bxyi,xyio->bxyo", found, real + 1j * imaginary)
            sides = ((0, 0), (0, x.shape[1] - self.modes), (0, x.shape[2] // 2 + 1 - self.modes), (0, 0))
            spread = jnp.fft.irfft2(jnp.pad(found, sides), axes=(1, 2), s=x.shape[1:3])
            x = nn.gelu(spread + nn.Dense(self.features)(x))
        return nn.Dense(1)(nn.gelu(nn.Dense(128)(x)))


def fourier_operator() -> Unseen:
    """Fields as they are a moment later."""
    model, fields = FourierOperator(), floats(16, 64, 64, 3)
    params = jax.eval_shape(model.init, RAW_KEY, fields)

    def loss(params: Any, fields: jax.Array, later: jax.Array) -> jax.Array:
        errors = jnp.square(model.apply(params, fields) - later).sum((1, 2, 3))
        return jnp.sqrt(errors / jnp.square(later).sum((1, 2, 3))).mean()

    return with_state(loss, params, optax.adamw(1e-3), fields, floats(16, 64, 64, 1))


Params = dict[str, Any]


def spline_bases(x: jax.Array, intervals: int, order: int) -> jax.Array:
    """All B-splines at each figure, by Cox and de Boor's recursion."""
    knots = (np.arange(-order, intervals + order + 1) * 2.0 / intervals - 1.0).astype(np.float32)
    x = x[..., None]
    bases = ((x >= knots[:-1]) & (x < knots[1:])).astype(x.dtype)
    for k in range(1, order + 1):
        left = (x - knots[: -(k + 1)]) / (knots[k:-1] - knots[: -(k + 1)]) * bases[..., :-1]
        right = (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k]) * bases[..., 1:]
        bases = left + right
    return bases


def splines() -> Unseen:
    """Digits, by layers that learn a function for each pair of features: splines (Liu et al. 2024)."""
    batch, widths, intervals, order = 4096, (784, 128, 64, 10), 5, 3
    params = [
        {
            "base": floats(before, after),
            "spline": floats(before, intervals + order, after),
            "scale": floats(before, after),
        }
        for before, after in pairwise(widths)
    ]

    def loss(params: list[Params], images: jax.Array, digits: jax.Array) -> jax.Array:
        x = images
        for layer in params:
            weights = layer["spline"] * layer["scale"][:, None]
            smooth = jnp.einsum("bik,iko->bo", spline_bases(x, intervals, order), weights)
            x = jax.nn.silu(x) @ layer["base"] + smooth
        decay = sum(jnp.abs(layer["spline"]).mean(1).sum() for layer in params)
        return cross_entropy(x, digits).mean() + 1e-4 * decay

    return with_state(loss, params, optax.sgd(0.05, momentum=0.9), floats(batch, widths[0]), tokens(batch))


class Learner(nn.Module):
    """Four convolutions and a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = nn.max_pool(nn.relu(nn.GroupNorm(8)(nn.Conv(32, (3, 3))(x))), (2, 2), (2, 2))
        return nn.Dense(5)(x.reshape(x.shape[0], -1))


def learning_to_learn() -> Unseen:
    """Gradients through two steps of gradient descent, for eight tasks at once (Finn et al. 2017)."""
    model, images, labels = Learner(), floats(8, 25, 48, 48, 3), tokens(8, 25)

    def loss_of_task(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images), labels).mean()

    def loss(params: Any, shown: jax.Array, named: jax.Array, asked: jax.Array, expected: jax.Array) -> jax.Array:
        def task(shown: jax.Array, named: jax.Array, asked: jax.Array, expected: jax.Array) -> jax.Array:
            fast = params
            for _ in range(2):
                gradients = jax.grad(loss_of_task)(fast, shown, named)
                fast = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, fast, gradients)
            return loss_of_task(fast, asked, expected)

        return jax.vmap(task)(shown, named, asked, expected).mean()

    params = jax.eval_shape(model.init, RAW_KEY, floats(25, 48, 48, 3))
    return with_state(loss, params, optax.adam(1e-3), images, labels, images, labels)


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
