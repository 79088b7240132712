"""A dozen more, written when the rules that the other networks taught had been made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, updated, with_arguments, with_state


class Encoder(nn.Module):
    """A transformer that normalises after each sum, with dropout (Devlin et al. 2019)."""

    words: int = 8000
    features: int = 256
    depth: int = 6

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        embed = nn.Embed(self.words, self.features)
        places = self.param("places", nn.initializers.normal(0.02), (text.shape[1], self.features))
        x = nn.LayerNorm()(embed(text) + places)
        for _ in range(self.depth):
            attended = nn.MultiHeadDotProductAttention(8, dropout_rate=0.1, deterministic=False)(x)
            x = nn.LayerNorm()(x + nn.Dropout(0.1, deterministic=False)(attended))
            wide = nn.gelu(nn.Dense(4 * self.features)(x))
            x = nn.LayerNorm()(x + nn.Dropout(0.1, deterministic=False)(nn.Dense(self.features)(wide)))
        return embed.attend(nn.LayerNorm()(nn.gelu(nn.Dense(self.features)(x))))


def masked_words() -> Unseen:
    """Words that are hidden are guessed; gradients are clipped by their norm."""
    model, text = Encoder(), tokens(16, 256)
    params = jax.eval_shape(lambda key, text: model.init({"params": key, "dropout": key}, text), RAW_KEY, text)

    def loss(params: Any, text: jax.Array, hidden: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(params, jnp.where(hidden, 3, text), rngs={"dropout": key})
        return jnp.where(hidden, cross_entropy(logits, text), 0.0).sum() / hidden.sum()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    return with_state(loss, params, optimizer, text, jax.ShapeDtypeStruct(text.shape, bool), RAW_KEY)


class StandardisedConv(nn.Module):
    """A convolution whose weights are standardised (Qiao et al. 2019)."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.he_normal(), (3, 3, x.shape[-1], self.features))
        kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
        strides = (self.stride, self.stride)
        return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


class GroupNormResNet(nn.Module):
    """Residual blocks with group norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = StandardisedConv(64)(x)
        for features in (64, 128, 256):
            for block in range(2):
                stride = 2 if block == 0 and features > 64 else 1
                y = StandardisedConv(features, stride)(nn.relu(nn.GroupNorm(16)(x)))
                y = StandardisedConv(features)(nn.relu(nn.GroupNorm(16)(y)))
                x = y + (x if x.shape == y.shape else nn.Conv(features, (1, 1), (stride, stride))(x))
        return nn.Dense(100)(nn.relu(nn.GroupNorm(16)(x)).mean((1, 2)))


def averaged_weights() -> Unseen:
    """Adam, and a moving average of the weights beside them."""
    model, images = GroupNormResNet(), floats(32, 64, 64, 3)
    params, optimizer = jax.eval_shape(model.init, RAW_KEY, images), optax.adam(1e-3)

    def step(state: tuple, images: jax.Array, labels: jax.Array) -> tuple[tuple, jax.Array]:
        params, averages, moments = state

        def loss(params: Any) -> jax.Array:
            return cross_entropy(model.apply(params, images), labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        params, moments = updated(optimizer, gradients, moments, params)
        averages = jax.tree.map(lambda mean, new: 0.999 * mean + 0.001 * new, averages, params)
        return (params, averages, moments), value

    return Unseen(step, ((params, params, jax.eval_shape(optimizer.init, params)), images, tokens(32)))


class GraphAttention(nn.Module):
    """Nodes that attend to their neighbours (Veličković et al. 2018)."""

    heads: int = 4
    features: int = 32

    @nn.compact
    def __call__(self, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        count = nodes.shape[0]
        x = nn.DenseGeneral((self.heads, self.features))(nodes)
        of_sender, of_receiver = nn.Dense(1)(x)[..., 0], nn.Dense(1)(x)[..., 0]
        scores = nn.leaky_relu(of_sender[senders] + of_receiver[receivers], 0.2)
        scores = jnp.exp(scores - jax.ops.segment_max(scores, receivers, count)[receivers])
        weights = scores / (jax.ops.segment_sum(scores, receivers, count)[receivers] + 1e-9)
        return jax.ops.segment_sum(weights[..., None] * x[senders], receivers, count).reshape(count, -1)


class GraphNetwork(nn.Module):
    """Three such layers."""

    @nn.compact
    def __call__(self, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        for _ in range(3):
            nodes = nn.elu(GraphAttention()(nodes, senders, receivers))
        return nn.Dense(40)(nodes)


def graph_attention() -> Unseen:
    """A class for each of 16,384 nodes of a graph of 131,072 edges."""
    model, nodes, edges = GraphNetwork(), floats(16384, 128), tokens(131072)

    def loss(params: Any, nodes: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, nodes, senders, receivers), labels).mean()

    params = jax.eval_shape(model.init, RAW_KEY, nodes, edges, edges)
    return with_arguments(loss, params, optax.adam(5e-3), nodes, edges, edges, tokens(16384))


class Listener(nn.Module):
    """Convolutions over frames, then recurrent networks that read both ways."""

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(256, (5,), (2,))(frames))
        for _ in range(2):
            ways = [nn.RNN(nn.LSTMCell(256)), nn.RNN(nn.LSTMCell(256), reverse=True, keep_order=True)]
            x = jnp.concatenate([way(x) for way in ways], -1)
        return nn.Dense(64)(x)


def speech() -> Unseen:
    """Letters from sound, aligned by the loss (Graves et al. 2006)."""
    model, frames, letters = Listener(), floats(32, 400, 80), tokens(32, 40)

    def loss(params: Any, frames: jax.Array, letters: jax.Array) -> jax.Array:
        logits = model.apply(params, frames)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), letters, jnp.zeros(letters.shape)).mean()

    return with_state(loss, jax.eval_shape(model.init, RAW_KEY, frames), optax.adam(1e-3), frames, letters)


class Pyramid(nn.Module):
    """Dilated convolutions, and maps of several sizes that are enlarged and added (Lin et al. 2017)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        def block(x: jax.Array, features: int, stride: int = 1, dilation: int = 1) -> jax.Array:
            x = nn.Conv(features, (3, 3), (stride, stride), kernel_dilation=(dilation, dilation), use_bias=False)(x)
            return nn.relu(nn.BatchNorm(use_running_average=not train)(x))

        maps = []
        for features in (32, 64, 128):
            x = block(block(x, features, stride=2), features)
            maps.append(x)
        deep = block(block(x, 128, dilation=2), 128, dilation=4)
        for level in reversed(maps):
            size = (*level.shape[:3], 64)
            deep = nn.Conv(64, (1, 1))(level) + jax.image.resize(nn.Conv(64, (1, 1))(deep), size, "bilinear")
        return nn.Conv(21, (1, 1))(jax.image.resize(block(deep, 64), (x.shape[0], 256, 256, 64), "bilinear"))


def segmentation() -> Unseen:
    """A class for each pixel, with momentum."""
    model, images, optimizer = Pyramid(), floats(8, 256, 256, 3), optax.sgd(0.1, 0.9)
    variables = jax.eval_shape(model.init, RAW_KEY, images)

    def step(state: tuple, images: jax.Array, labels: jax.Array) -> tuple[tuple, jax.Array]:
        params, statistics, momentum = state

        def loss(params: Any) -> tuple[jax.Array, Any]:
            found = {"params": params, "batch_stats": statistics}
            logits, changed = model.apply(found, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels).mean(), changed["batch_stats"]

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        params, momentum = updated(optimizer, gradients, momentum, params)
        return (params, statistics, momentum), value

    params = variables["params"]
    state = (params, variables["batch_stats"], jax.eval_shape(optimizer.init, params))
    return Unseen(step, (state, images, tokens(8, 256, 256)))


class Windows(nn.Module):
    """Attention within windows, every other time shifted by half of one (Liu et al. 2021)."""

    heads: int
    shift: int
    window: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, features = x.shape
        w, rows, columns = self.window, height // self.window, width // self.window
        y = jnp.roll(nn.LayerNorm()(x), (-self.shift, -self.shift), (1, 2))
        y = y.reshape(batch, rows, w, columns, w, features).transpose(0, 1, 3, 2, 4, 5).reshape(-1, w * w, features)
        queries, keys, values = jnp.split(nn.Dense(3 * features)(y), 3, -1)
        heads = (-1, w * w, self.heads, features // self.heads)
        bias = self.param("bias", nn.initializers.zeros, (self.heads, w * w, w * w))
        y = jax.nn.dot_product_attention(*(one.reshape(heads) for one in (queries, keys, values)), bias=bias[None])
        y = nn.Dense(features)(y.reshape(-1, w * w, features))
        y = y.reshape(batch, rows, columns, w, w, features).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
        x = x + jnp.roll(y, (self.shift, self.shift), (1, 2))
        return x + nn.Dense(features)(nn.gelu(nn.Dense(4 * features)(nn.LayerNorm()(x))))


class ShiftedWindows(nn.Module):
    """Two sizes, between which four patches are merged."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(96, (4, 4), (4, 4))(x)
        for features, heads in ((96, 3), (192, 6)):
            if features > 96:
                corners = [x[:, i::2, j::2] for i in range(2) for j in range(2)]
                x = nn.Dense(features)(nn.LayerNorm()(jnp.concatenate(corners, -1)))
            for shift in (0, 4):
                x = Windows(heads, shift)(x)
        return nn.Dense(1000)(nn.LayerNorm()(x).mean((1, 2)))


def shifted_windows() -> Unseen:
    """Images of 256², a class each."""
    model, images = ShiftedWindows(), floats(16, 256, 256, 3)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy(model.apply(params, images), optax.smooth_labels(labels, 0.1)).mean()

    params = jax.eval_shape(model.init, RAW_KEY, images)
    return with_arguments(loss, params, optax.adamw(1e-3), images, floats(16, 1000))


class Field(nn.Module):
    """Density and colour at a point, from sines of its place (Mildenhall et al. 2020)."""

    @nn.compact
    def __call__(self, points: jax.Array, directions: jax.Array) -> tuple[jax.Array, jax.Array]:
        def waves(x: jax.Array, count: int) -> jax.Array:
            angles = x[..., None, :] * (2.0 ** jnp.arange(count))[:, None]
            return jnp.concatenate([x, *(f(angles).reshape(*x.shape[:-1], -1) for f in (jnp.sin, jnp.cos))], -1)

        places = x = waves(points, 10)
        for layer in range(8):
            x = nn.relu(nn.Dense(256)(x if layer != 5 else jnp.concatenate([x, places], -1)))
        seen = jnp.broadcast_to(waves(directions, 4)[:, None], (*points.shape[:2], 27))
        colour = nn.relu(nn.Dense(128)(jnp.concatenate([nn.Dense(256)(x), seen], -1)))
        return nn.softplus(nn.Dense(1)(x)[..., 0]), nn.sigmoid(nn.Dense(3)(colour))


def radiance_field() -> Unseen:
    """Colours of rays, summed up over random points along each."""
    model, rays = Field(), floats(2048, 3)
    params = jax.eval_shape(model.init, RAW_KEY, floats(2048, 64, 3), rays)

    def loss(params: Any, origins: jax.Array, directions: jax.Array, colours: jax.Array, key: jax.Array) -> jax.Array:
        depths = jnp.sort(jax.random.uniform(key, (2048, 64), minval=2.0, maxval=6.0), -1)
        points = origins[:, None] + depths[..., None] * directions[:, None]
        density, colour = model.apply(params, points, directions)
        steps = jnp.diff(depths, axis=-1, append=6.0)
        opaque = 1 - jnp.exp(-density * steps)
        through = jnp.cumprod(jnp.concatenate([jnp.ones((2048, 1)), 1 - opaque[:, :-1] + 1e-10], -1), -1)
        return jnp.square(((opaque * through)[..., None] * colour).sum(1) - colours).mean()

    return with_state(loss, params, optax.adam(5e-4), rays, rays, rays, RAW_KEY)


class Views(nn.Module):
    """A small convolutional network with a projection."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64, 128):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(features, (3, 3))(x)))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.Dense(64)(nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1))))
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


def two_views() -> Unseen:
    """Two views of each image find each other among 512 (Chen et al. 2020)."""
    model, images = Views(), floats(256, 32, 32, 3)
    variables = jax.eval_shape(model.init, RAW_KEY, images)

    def loss(variables: Any, one: jax.Array, other: jax.Array) -> jax.Array:
        found, _ = model.apply(variables, jnp.concatenate([one, other]), mutable=["batch_stats"])
        logits = jnp.where(jnp.eye(512, dtype=bool), -1e9, found @ found.T / 0.1)
        return cross_entropy(logits, (jnp.arange(512) + 256) % 512).mean()

    return with_state(loss, variables, optax.sgd(0.3, 0.9), images, images)


class ChunkedAttention(nn.Module):
    """Linear attention with a decay, chunk by chunk (Sun et al. 2023)."""

    heads: int = 4
    chunk: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, features = x.shape
        width = features // self.heads
        shape = (batch, length // self.chunk, self.chunk, self.heads, width)
        q, k, v = (nn.Dense(features, use_bias=False)(x).reshape(shape).transpose(1, 0, 3, 2, 4) for _ in range(3))
        decay = 1 - 2.0 ** (-5.0 - jnp.arange(self.heads))
        places = jnp.arange(self.chunk)
        apart = places[:, None] - places[None]
        inside = jnp.where(apart >= 0, decay[:, None, None] ** apart, 0.0)
        before, after = decay[:, None] ** (places + 1), decay[:, None] ** (self.chunk - 1 - places)

        def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v = chunk
            here = jnp.einsum("bhij,bhjd->bhid", jnp.einsum("bhid,bhjd->bhij", q, k) * inside, v)
            earlier = jnp.einsum("bhid,bhde->bhie", q * before[..., None], state)
            made = jnp.einsum("bhjd,bhje->bhde", k * after[..., None], v)
            return state * (decay**self.chunk)[:, None, None] + made, here + earlier

        _, y = lax.scan(step, jnp.zeros((batch, self.heads, width, width)), (q, k, v))
        y = y.transpose(1, 0, 3, 2, 4).reshape(batch, length, features)
        return nn.Dense(features, use_bias=False)(nn.GroupNorm(self.heads)(y) * nn.silu(nn.Dense(features)(x)))


class Retention(nn.Module):
    """Four layers of it."""

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(4000, 256)(text)
        for _ in range(4):
            x = x + ChunkedAttention()(nn.RMSNorm()(x))
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.RMSNorm()(x))))
        return nn.Dense(4000, use_bias=False)(nn.RMSNorm()(x))


def retention() -> Unseen:
    """The next of 1,024 words."""
    model, text = Retention(), tokens(8, 1024)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, text)[:, :-1], text[:, 1:]).mean()

    return with_arguments(loss, jax.eval_shape(model.init, RAW_KEY, text), optax.adamw(3e-4), text)


class Points(nn.Module):
    """The same small network for each point, and the largest of what it finds (Qi et al. 2017)."""

    @nn.compact
    def __call__(self, points: jax.Array) -> jax.Array:
        turned = points @ (jnp.eye(3) + nn.Dense(9)(nn.relu(nn.Dense(128)(points)).max(1)).reshape(-1, 3, 3))
        x = turned
        for features in (64, 128, 512):
            x = nn.relu(nn.LayerNorm()(nn.Dense(features)(x)))
        return nn.Dense(40)(nn.relu(nn.Dense(256)(x.max(1))))


def points() -> Unseen:
    """Clouds of 2,048 points, a class each."""
    model, clouds = Points(), floats(32, 2048, 3)

    def loss(params: Any, clouds: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, clouds), labels).mean()

    params = jax.eval_shape(model.init, RAW_KEY, clouds)
    return with_arguments(loss, params, optax.adam(1e-3), clouds, tokens(32))


def adapters() -> Unseen:
    """A language model that stays as it is, with two narrow matrices beside each of its products (Hu et al. 2021)."""
    width, depth, rank, heads = 384, 6, 8, 6
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    frozen = {
        "embed": jax.ShapeDtypeStruct((8000, width), jnp.bfloat16),
        "layers": [{k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in shapes.items()} for _ in range(depth)],
    }
    narrow = [{k: (floats(a, rank), floats(rank, b)) for k, (a, b) in shapes.items()} for _ in range(depth)]

    def normed(x: jax.Array) -> jax.Array:
        return (x / jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)

    def loss(narrow: Any, frozen: Any, text: jax.Array) -> jax.Array:
        x = frozen["embed"][text]
        for layer, beside in zip(frozen["layers"], narrow, strict=True):

            def product(x: jax.Array, name: str, layer: Any = layer, beside: Any = beside) -> jax.Array:
                down, up = (one.astype(jnp.bfloat16) for one in beside[name])
                return x @ layer[name] + 2.0 * (x @ down) @ up

            parts = jnp.split(product(normed(x), "qkv"), 3, -1)
            q, k, v = (one.reshape(*x.shape[:2], heads, width // heads) for one in parts)
            x = x + product(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), "out")
            x = x + product(nn.gelu(product(normed(x), "up")), "down")
        logits = (normed(x) @ frozen["embed"].T).astype(jnp.float32)
        return cross_entropy(logits[:, :-1], text[:, 1:]).mean()

    return with_arguments(loss, narrow, optax.adamw(1e-4), frozen, tokens(8, 512))


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
