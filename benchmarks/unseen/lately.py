"""Seven more, written when the rules that the dozen before taught had been made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, updated, with_state


class Coupling(nn.Module):
    """Half of the channels, scaled and shifted by what a small network makes of the other half (Dinh et al. 2017)."""

    features: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept, changed = jnp.split(x, 2, axis=-1)
        y = nn.relu(nn.Conv(self.features, (3, 3))(kept))
        y = nn.relu(nn.Conv(self.features, (1, 1))(y))
        scale, shift = jnp.split(nn.Conv(x.shape[-1], (3, 3))(y), 2, axis=-1)
        scale = nn.sigmoid(scale + 2.0)
        return jnp.concatenate([kept, (changed + shift) * scale], -1), jnp.log(scale).sum((1, 2, 3))


class Flow(nn.Module):
    """A normalising flow with invertible 1 × 1 convolutions (Kingma & Dhariwal 2018)."""

    steps: int = 6

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x, total = images, jnp.zeros(images.shape[0])
        for _ in range(2):
            count, height, width, channels = x.shape
            x = x.reshape(count, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
            x = x.reshape(count, height // 2, width // 2, 4 * channels)
            for _ in range(self.steps):
                x, logarithm = Coupling()(nn.Dense(x.shape[-1])(x))
                total = total + logarithm
        return -0.5 * jnp.square(x).sum((1, 2, 3)) + total


def flow() -> Unseen:
    """The likelihood of images."""
    model, images = Flow(), floats(16, 32, 32, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, images: jax.Array) -> jax.Array:
        return -model.apply(params, images).mean()

    return with_state(loss, params, optax.adam(1e-3), images)


class Classifier(nn.Module):
    """Convolutions of some width, with batch-free normalisation."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in range(3):
            for block in range(self.depth):
                strides = (2, 2) if block == 0 else (1, 1)
                x = nn.relu(nn.GroupNorm(8)(nn.Conv(self.width * 2**stage, (3, 3), strides)(x)))
        return nn.Dense(100)(x.mean((1, 2)))


def distillation() -> Unseen:
    """A small network learns what a large one, which is not trained, says of images (Hinton et al. 2015)."""
    teacher, student, images = Classifier(96, 4), Classifier(32, 2), floats(32, 64, 64, 3)
    known = jax.eval_shape(teacher.init, RAW_KEY, images)
    params = jax.eval_shape(student.init, RAW_KEY, images)

    def loss(params: Any, known: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        wanted = nn.softmax(jax.lax.stop_gradient(teacher.apply(known, images)) / 4.0)
        logits = student.apply(params, images)
        soft = -(wanted * nn.log_softmax(logits / 4.0)).sum(-1)
        return (cross_entropy(logits, labels) + 16.0 * soft).mean()

    return with_state(loss, params, optax.sgd(0.1, momentum=0.9), known, images, tokens(32))


class SuperResolution(nn.Module):
    """Residual blocks without normalisation, and pixels shuffled to twice the size (Lim et al. 2017)."""

    features: int = 64
    depth: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = x = nn.Conv(self.features, (3, 3))(x)
        for _ in range(self.depth):
            y = nn.Conv(self.features, (3, 3))(nn.relu(nn.Conv(self.features, (3, 3))(x)))
            x = x + 0.1 * y
        x = nn.Conv(4 * self.features, (3, 3))(x + first)
        count, height, width, _ = x.shape
        x = x.reshape(count, height, width, 2, 2, self.features).transpose(0, 1, 3, 2, 4, 5)
        return nn.Conv(3, (3, 3))(x.reshape(count, 2 * height, 2 * width, self.features))


def super_resolution() -> Unseen:
    """Absolute errors of images of twice the size."""
    model, small = SuperResolution(), floats(8, 48, 48, 3)
    params = jax.eval_shape(model.init, RAW_KEY, small)

    def loss(params: Any, small: jax.Array, large: jax.Array) -> jax.Array:
        return jnp.abs(model.apply(params, small) - large).mean()

    return with_state(loss, params, optax.adam(1e-4), small, floats(8, 96, 96, 3))


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


class Detector(nn.Module):
    """Maps of three sizes, the smaller ones enlarged and added, with a head that all share (Lin et al. 2017)."""

    kinds: int = 20

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        maps = []
        for features in (32, 64, 128, 256):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(features, (3, 3), (2, 2))(x)))
            x = x + nn.relu(nn.GroupNorm(8)(nn.Conv(features, (3, 3))(x)))
            maps.append(nn.Conv(96, (1, 1))(x))
        found = [maps[-1]]
        for one in maps[-2:0:-1]:
            found.append(one + jax.image.resize(found[-1], one.shape, "nearest"))
        hidden, kinds, boxes = nn.Conv(96, (3, 3)), nn.Conv(self.kinds, (3, 3)), nn.Conv(4, (3, 3))
        heads = [nn.relu(hidden(one)) for one in found]
        logits = [kinds(one).reshape(one.shape[0], -1, self.kinds) for one in heads]
        sides = [boxes(one).reshape(one.shape[0], -1, 4) for one in heads]
        return jnp.concatenate(logits, 1), jnp.concatenate(sides, 1)


def detector() -> Unseen:
    """Focal losses of kinds, and of boxes where there is something (Lin et al. 2017)."""
    model, images = Detector(), floats(8, 128, 128, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)
    count = jax.eval_shape(model.apply, params, images)[1].shape[1]

    def loss(params: Any, images: jax.Array, kinds: jax.Array, boxes: jax.Array) -> jax.Array:
        logits, sides = model.apply(params, images)
        wanted = nn.one_hot(kinds - 1, logits.shape[-1])
        chance = nn.sigmoid(logits)
        right = wanted * chance + (1 - wanted) * (1 - chance)
        focal = jnp.square(1 - right) * optax.sigmoid_binary_cross_entropy(logits, wanted)
        off = optax.huber_loss(sides, boxes).sum(-1)
        return (focal.sum(-1) + jnp.where(kinds > 0, off, 0.0)).sum() / jnp.maximum((kinds > 0).sum(), 1)

    return with_state(loss, params, optax.adam(1e-3), images, tokens(8, count), floats(8, count, 4))


class Grouped(nn.Module):
    """Bottlenecks of grouped convolutions, with batch statistics (Xie et al. 2017)."""

    groups: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def normalised(x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False)(x)

        x = nn.relu(normalised(nn.Conv(64, (3, 3), use_bias=False)(x)))
        for stage in range(3):
            width = 64 * 2**stage
            for block in range(2):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(normalised(nn.Conv(width, (1, 1), use_bias=False)(x)))
                y = nn.Conv(width, (3, 3), strides, feature_group_count=self.groups, use_bias=False)(y)
                y = normalised(nn.Conv(2 * width, (1, 1), use_bias=False)(nn.relu(normalised(y))))
                if x.shape != y.shape:
                    x = normalised(nn.Conv(2 * width, (1, 1), strides, use_bias=False)(x))
                x = nn.relu(x + y)
        return nn.Dense(100)(x.mean((1, 2)))


def grouped() -> Unseen:
    """Classes of images."""
    model, images = Grouped(), floats(32, 64, 64, 3)
    variables = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, statistics: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        logits, new = model.apply({"params": params, **statistics}, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels).mean(), new

    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, statistics, optimizer_state = state
        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(params, statistics, images, labels)
        params, optimizer_state = updated(optimizer, gradients, optimizer_state, params)
        return (params, statistics, optimizer_state), value

    params = variables["params"]
    state = (params, {"batch_stats": variables["batch_stats"]}, jax.eval_shape(optimizer.init, params))
    return Unseen(step, (state, images, tokens(32)))


class Quantised(nn.Module):
    """Codes from a book in place of what an encoder makes, past which gradients go (van den Oord et al. 2017)."""

    codes: int = 512
    features: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def residual(x: jax.Array) -> jax.Array:
            return x + nn.Conv(128, (1, 1))(nn.relu(nn.Conv(64, (3, 3))(nn.relu(x))))

        for features in (64, 128):
            x = nn.relu(nn.Conv(features, (4, 4), (2, 2))(x))
        found = nn.Conv(self.features, (1, 1))(residual(residual(x)))
        book = self.param("book", nn.initializers.uniform(0.1), (self.codes, self.features))
        distances = jnp.square(found).sum(-1, keepdims=True) - 2 * found @ book.T + jnp.square(book).sum(-1)
        nearest = book[distances.argmin(-1)]
        x = residual(residual(nn.Conv(128, (3, 3))(found + jax.lax.stop_gradient(nearest - found))))
        x = nn.relu(nn.ConvTranspose(64, (4, 4), (2, 2))(nn.relu(x)))
        return nn.ConvTranspose(3, (4, 4), (2, 2))(x), found, nearest


def quantised() -> Unseen:
    """Images again, codes near what is found, and what is found near its codes."""
    model, images = Quantised(), floats(32, 64, 64, 3)
    params = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(params: Any, images: jax.Array) -> jax.Array:
        again, found, nearest = model.apply(params, images)
        stop = jax.lax.stop_gradient
        errors = (again - images, nearest - stop(found), 0.5 * (found - stop(nearest)))
        return sum(jnp.square(error).mean() for error in errors)

    return with_state(loss, params, optax.adam(2e-4), images)
