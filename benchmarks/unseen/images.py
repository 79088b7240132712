"""Networks of images and of films."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax import lax

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, sinusoids, updated

BatchNorm = partial(nn.BatchNorm, use_running_average=False)


class TimedBlock(nn.Module):
    """A residual block that is told how much noise there is."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        y = y + nn.Dense(self.features)(nn.silu(time))[:, None, None]
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(8)(y)))
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1))(x)
        return x + y


class AttentionBlock(nn.Module):
    """Attention of every pixel to every other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, features = x.shape
        y = nn.GroupNorm(8)(x).reshape(batch, height * width, features)
        return x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y).reshape(x.shape)


class NoiseUNet(nn.Module):
    """The U-Net of denoising diffusion (Ho et al. 2020), smaller."""

    widths: tuple[int, ...] = (64, 128, 128)

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        first, last = self.widths[0], self.widths[-1]
        time = nn.Dense(4 * first)(sinusoids(times, first))
        time = nn.Dense(4 * first)(nn.silu(time))
        x = nn.Conv(first, (3, 3))(images)
        skips = [x]
        for number, width in enumerate(self.widths, 1):
            x = TimedBlock(width)(x, time)
            if number == len(self.widths):
                x = AttentionBlock()(x)
            skips.append(x)
            if number < len(self.widths):
                x = nn.Conv(width, (3, 3), strides=(2, 2))(x)
                skips.append(x)
        x = TimedBlock(last)(x, time)
        x = AttentionBlock()(x)
        for number, width in reversed(list(enumerate(self.widths))):
            for _ in range(2):
                x = TimedBlock(width)(jnp.concatenate([x, skips.pop()], -1), time)
            if number:
                batch, height, across, features = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * across, features), "nearest")
                x = nn.Conv(width, (3, 3))(x)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


def diffusion() -> Unseen:
    """Denoising diffusion (Ho et al. 2020): random noise and times, clipping, a running average of the parameters."""
    model: Any = NoiseUNet()
    images = floats(16, 32, 32, 3)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))

    def loss(params: Any, noisy: jax.Array, times: jax.Array, noise: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(params, noisy, times) - noise) ** 2)

    def step(state: dict[str, Any], images: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        key, for_times, for_noise = jax.random.split(state["key"], 3)
        times = jax.random.randint(for_times, (images.shape[0],), 0, 1000)
        noise = jax.random.normal(for_noise, images.shape)
        part = kept[times][:, None, None, None]
        noisy = jnp.sqrt(part) * images + jnp.sqrt(1 - part) * noise
        value, gradients = jax.value_and_grad(loss)(state["params"], noisy, times, noise)
        params, optimizer_state = updated(optimizer, gradients, state["optimizer"], state["params"])
        average = optax.incremental_update(params, state["average"], 1e-3)
        count = state["number"] + 1
        return {"params": params, "average": average, "optimizer": optimizer_state, "key": key, "number": count}, value

    params = jax.eval_shape(model.init, RAW_KEY, images, tokens(16))
    optimizer_state = jax.eval_shape(optimizer.init, params)
    state = {"params": params, "average": params, "optimizer": optimizer_state, "key": RAW_KEY, "number": tokens()}
    return Unseen(step, (state, images))


class VariationalAutoencoder(nnx.Module):
    """A variational autoencoder (Kingma & Welling 2014) of strided convolutions, in NNX."""

    def __init__(self, features: int, latent: int, size: int, rngs: nnx.Rngs):
        conv, transposed = (
            partial(layer, kernel_size=(4, 4), strides=2, rngs=rngs) for layer in (nnx.Conv, nnx.ConvTranspose)
        )
        self.smallest = (size // 8, size // 8, 4 * features)
        flat = (size // 8) ** 2 * 4 * features
        self.conv1, self.conv2 = conv(3, features), conv(features, 2 * features)
        self.conv3 = conv(2 * features, 4 * features)
        self.mean, self.log_variance = (nnx.Linear(flat, latent, rngs=rngs) for _ in range(2))
        self.unpack = nnx.Linear(latent, flat, rngs=rngs)
        self.deconv1, self.deconv2 = transposed(4 * features, 2 * features), transposed(2 * features, features)
        self.deconv3 = transposed(features, 3)
        self.batch_norm1, self.batch_norm2 = (nnx.BatchNorm(2 * features, rngs=rngs) for _ in range(2))

    def __call__(self, images: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = nnx.leaky_relu(self.conv1(images), 0.2)
        x = nnx.leaky_relu(self.batch_norm1(self.conv2(x)), 0.2)
        x = nnx.leaky_relu(self.conv3(x), 0.2)
        x = x.reshape(x.shape[0], -1)
        mean, log_variance = self.mean(x), self.log_variance(x)
        latent = mean + noise * jnp.exp(0.5 * log_variance)
        x = nnx.relu(self.unpack(latent)).reshape(-1, *self.smallest)
        x = nnx.relu(self.deconv2(nnx.relu(self.batch_norm2(self.deconv1(x)))))
        return self.deconv3(x), mean, log_variance


def vae() -> Unseen:
    """A variational autoencoder in NNX's functional style: split, and merged in the loss."""
    latent, size = 128, 64
    optimizer = optax.adam(1e-3)
    abstract = nnx.eval_shape(lambda: VariationalAutoencoder(32, latent, size, nnx.Rngs(0)))
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)

    def loss(params: Any, rest: Any, images: jax.Array, noise: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        model = nnx.merge(graph, params, rest, copy=True)
        made, mean, log_variance = model(images, noise)
        rebuilt = optax.sigmoid_binary_cross_entropy(made, images).sum((1, 2, 3)).mean()
        divergence = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1).mean()
        return rebuilt + divergence, (nnx.split(model, nnx.Param, ...)[2], rebuilt, divergence)

    def step(state: tuple[Any, Any, Any], images: jax.Array, key: jax.Array) -> tuple[tuple, dict[str, jax.Array]]:
        params, rest, optimizer_state = state
        noise = jax.random.normal(key, (images.shape[0], latent))
        found, gradients = jax.value_and_grad(loss, has_aux=True)(params, rest, images, noise)
        value, (rest, rebuilt, divergence) = found
        params, optimizer_state = updated(optimizer, gradients, optimizer_state, params)
        return (params, rest, optimizer_state), {"cross_entropy": rebuilt, "divergence": divergence, "loss": value}

    state = (params, rest, jax.eval_shape(optimizer.init, params))
    return Unseen(step, (state, floats(64, size, size, 3), RAW_KEY))


class MobileBlock(nn.Module):
    """An inverted bottleneck with squeeze-and-excitation, left out for some images (Huang et al. 2016)."""

    features: int
    kernel: int
    stride: int
    expansion: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        narrow = x.shape[-1]
        wide = narrow * self.expansion
        y = x
        if self.expansion > 1:
            y = nn.swish(BatchNorm()(nn.Conv(wide, (1, 1), use_bias=False)(y)))
        window, strides = (self.kernel,) * 2, (self.stride,) * 2
        y = nn.Conv(wide, window, strides, feature_group_count=wide, use_bias=False)(y)
        y = nn.swish(BatchNorm()(y))
        squeezed = y.mean((1, 2), keepdims=True)
        gate = nn.sigmoid(nn.Conv(wide, (1, 1))(nn.swish(nn.Conv(narrow // 4, (1, 1))(squeezed))))
        y = BatchNorm()(nn.Conv(self.features, (1, 1), use_bias=False)(y * gate))
        if x.shape == y.shape:
            y = x + nn.Dropout(0.1, broadcast_dims=(1, 2, 3), deterministic=False)(y)
        return y


class EfficientNet(nn.Module):
    """EfficientNet (Tan & Le 2019), smaller; blocks are features, kernel, stride, expansion."""

    blocks: tuple[tuple[int, int, int, int], ...] = (
        *((16, 3, 1, 1), (24, 3, 2, 6), (24, 3, 1, 6)),
        *((40, 5, 2, 6), (40, 5, 1, 6), (80, 3, 2, 6)),
    )

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.swish(BatchNorm()(nn.Conv(32, (3, 3), (2, 2), use_bias=False)(images)))
        for block in self.blocks:
            x = MobileBlock(*block)(x)
        x = nn.swish(BatchNorm()(nn.Conv(256, (1, 1), use_bias=False)(x))).mean((1, 2))
        return nn.Dense(100)(nn.Dropout(0.2, deterministic=False)(x))


def efficientnet() -> Unseen:
    """Batch normalisation, dropout and smooth labels, trained by RMSProp."""
    model, optimizer = EfficientNet(), optax.rmsprop(1e-2, decay=0.9, momentum=0.9)
    images, labels = floats(16, 96, 96, 3), tokens(16)

    def loss(params: Any, batch_stats: Any, key: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = model.apply(variables, images, rngs={"dropout": key}, mutable=["batch_stats"])
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, 100), 0.1)
        return optax.softmax_cross_entropy(logits, smooth).mean(), changed["batch_stats"]

    def step(state: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        key, used = jax.random.split(state["key"])
        with_stats = jax.value_and_grad(loss, has_aux=True)
        (value, stats), gradients = with_stats(state["params"], state["batch_stats"], used, *batch)
        params, optimizer_state = updated(optimizer, gradients, state["optimizer"], state["params"])
        return {"params": params, "batch_stats": stats, "optimizer": optimizer_state, "key": key}, value

    variables = jax.eval_shape(model.init, {"params": RAW_KEY, "dropout": RAW_KEY}, images)
    optimizer_state = jax.eval_shape(optimizer.init, variables["params"])
    return Unseen(step, ({**variables, "optimizer": optimizer_state, "key": RAW_KEY}, (images, labels)))


class FilmNetwork(nn.Module):
    """Convolutions over space and time (Tran et al. 2015)."""

    features: tuple[int, ...] = (16, 32, 64, 64)

    @nn.compact
    def __call__(self, films: jax.Array) -> jax.Array:
        x = films
        for number, features in enumerate(self.features):
            x = nn.relu(BatchNorm()(nn.Conv(features, (3, 3, 3), use_bias=False)(x)))
            window = (2 if number else 1, 2, 2)
            x = nn.max_pool(x, window, window)
        return nn.Dense(101)(nn.relu(nn.Dense(256)(x.mean((1, 2, 3)))))


def conv3d() -> Unseen:
    """Films, by a loss with weight decay in it and Nesterov's momentum."""
    model, optimizer = FilmNetwork(), optax.sgd(1e-2, momentum=0.9, nesterov=True)
    films = floats(4, 16, 56, 56, 3)

    def loss(params: Any, batch_stats: Any, films: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = model.apply(variables, films, mutable=["batch_stats"])
        decay = sum((leaf**2).sum() for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
        return cross_entropy(logits, labels).mean() + 1e-4 * decay, changed["batch_stats"]

    def step(state: tuple[Any, Any, Any], films: jax.Array, labels: jax.Array) -> tuple[tuple, jax.Array]:
        params, stats, optimizer_state = state
        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params, stats, films, labels)
        params, optimizer_state = updated(optimizer, gradients, optimizer_state, params)
        return (params, stats, optimizer_state), value

    variables = jax.eval_shape(model.init, RAW_KEY, films)
    params = variables["params"]
    state = (params, variables["batch_stats"], jax.eval_shape(optimizer.init, params))
    return Unseen(step, (state, films, tokens(4)))


class ResidualGroups(nn.Module):
    """Residual blocks with group normalisation (Wu & He 2018)."""

    features: int = 32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (3, 3))(images)
        for factor, stride in ((1, 1), (2, 2), (4, 2)):
            width, strides = factor * self.features, (stride, stride)
            y = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), strides, use_bias=False)(x)))
            y = nn.GroupNorm(8)(nn.Conv(width, (3, 3), use_bias=False)(y))
            x = nn.relu(y + (x if stride == 1 else nn.Conv(width, (1, 1), strides)(x)))
        return nn.Dense(10)(x.mean((1, 2)))


def accumulate() -> Unseen:
    """Gradients summed over micro-batches in a scan."""
    model: Any = ResidualGroups()
    parts = 4
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))
    images = floats(64, 48, 48, 3)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images), labels).mean()

    def step(state: tuple[Any, Any], images: jax.Array, labels: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, optimizer_state = state

        def add(total: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *batch)), None

        batches = images.reshape(parts, -1, *images.shape[1:]), labels.reshape(parts, -1)
        (value, gradients), _ = lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, params)), batches)
        gradients = jax.tree.map(lambda total: total / parts, gradients)
        return updated(optimizer, gradients, optimizer_state, params), value / parts

    params = jax.eval_shape(model.init, RAW_KEY, images)
    return Unseen(step, ((params, jax.eval_shape(optimizer.init, params)), images, tokens(64)))
