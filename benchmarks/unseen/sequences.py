"""Nine steps over tokens, rows of tables, graphs and points."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from benchmarks.unseen.step import (
    RAW_KEY,
    Unseen,
    cross_entropy,
    floats,
    next_token,
    step_of,
    tokens,
    with_arguments,
    with_state,
)


def dense_layers(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Dense layers with a ReLU after each but the last."""
    for number, layer in enumerate(layers, 1):
        x = x @ layer["weight"] + layer["bias"]
        if number < len(layers):
            x = jax.nn.relu(x)
    return x


def dense_shapes(*widths: int) -> list[dict[str, Any]]:
    """Parameters of `dense_layers`."""
    return [{"weight": floats(before, after), "bias": floats(after)} for before, after in pairwise(widths)]


def dlrm() -> Unseen:
    """A recommender (Naumov et al. 2019) in plain JAX: tables of embeddings, products of every pair, Adagrad."""
    batch, tables, rows, features, looked_up = 8192, 16, 2000, 32, 3
    pairs = tables * (tables + 1) // 2

    def loss(params: Any, read: dict[str, jax.Array]) -> jax.Array:
        x = jax.nn.relu(dense_layers(params["bottom"], read["dense"]))
        found = zip(params["tables"], read["indices"], strict=True)
        looked_up = [jnp.take(table, indices, axis=0).sum(1) for table, indices in found]
        together = jnp.stack([x, *looked_up], 1)
        products = jnp.einsum("bfe,bge->bfg", together, together)
        first, second = jnp.tril_indices(tables + 1, -1)
        logits = dense_layers(params["top"], jnp.concatenate([x, products[:, first, second]], -1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, read["labels"]).mean()

    params = {
        "tables": [floats(rows, features)] * tables,
        "bottom": dense_shapes(13, 256, 128, features),
        "top": dense_shapes(features + pairs, 256, 128, 1),
    }
    read = {"dense": floats(batch, 13), "indices": tokens(tables, batch, looked_up), "labels": floats(batch)}
    return with_arguments(loss, params, optax.adagrad(0.01), read)


def fourier(size: int, bands: int) -> jax.Array:
    """Positions of pixels as waves."""
    across = jnp.linspace(-1, 1, size)
    places = jnp.stack(jnp.meshgrid(across, across, indexing="ij"), -1).reshape(size * size, 2)
    waves = places[..., None] * jnp.linspace(1, size / 2, bands) * jnp.pi
    waves = waves.reshape(size * size, -1)
    return jnp.concatenate([jnp.sin(waves), jnp.cos(waves), places], -1)


class Perceiver(nn.Module):
    """Few latents that attend to all pixels (Jaegle et al. 2021), again and again with the same weights."""

    latents: int = 64
    features: int = 128
    repetitions: int = 4

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        latents = self.param("latent", nn.initializers.normal(0.02), (self.latents, self.features))
        x = jnp.broadcast_to(latents, (pixels.shape[0], *latents.shape))
        size = self.features
        cross = nn.MultiHeadDotProductAttention(num_heads=1, qkv_features=size, out_features=size)
        among = nn.MultiHeadDotProductAttention(num_heads=4)
        before_cross, before_among, before_dense, of_pixels = (nn.LayerNorm() for _ in range(4))
        wide, narrow = nn.Dense(4 * self.features), nn.Dense(self.features)
        read = of_pixels(pixels)
        for _ in range(self.repetitions):
            x = x + cross(before_cross(x), read)
            y = before_among(x)
            x = x + among(y, y)
            x = x + narrow(nn.gelu(wide(before_dense(x))))
        return nn.Dense(100)(x.mean(1))


def perceiver() -> Unseen:
    """Images as sets of pixels with their places, trained by LAMB (You et al. 2020)."""
    model: Any = Perceiver()
    size = 64
    images = floats(8, size, size, 3)

    def pixels_of(images: jax.Array) -> jax.Array:
        waves = fourier(size, 12)
        flat = images.reshape(images.shape[0], size * size, 3)
        return jnp.concatenate([flat, jnp.broadcast_to(waves, (images.shape[0], *waves.shape))], -1)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, pixels_of(images)), labels).mean()

    params = jax.eval_shape(lambda key, images: model.init(key, pixels_of(images)), RAW_KEY, images)
    return with_arguments(loss, params, optax.lamb(1e-3), images, tokens(8))


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


class MixtureOfExperts(nn.Module):
    """Dense layers of which each token takes two, as far as these have room (Lepikhin et al. 2020)."""

    experts: int = 8
    room: float = 1.25

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, length, features = x.shape
        capacity = int(self.room * 2 * length / self.experts)
        gates = nn.softmax(nn.Dense(self.experts, use_bias=False)(x))
        weights, indices = lax.top_k(gates, 2)
        weights = weights / weights.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(indices, self.experts)
        first_choices_first = chosen.swapaxes(1, 2).reshape(batch, 2 * length, self.experts)
        places = (jnp.cumsum(first_choices_first, 1) - 1).reshape(batch, 2, length, self.experts).swapaxes(1, 2)
        kept = chosen * (places < capacity)
        sent = kept[..., None] * jax.nn.one_hot(places.astype(jnp.int32), capacity)
        combined = (sent * weights[..., None, None]).sum(2)
        sent = sent.sum(2)
        first = self.param("first", nn.initializers.lecun_normal(), (self.experts, features, 4 * features))
        second = self.param("second", nn.initializers.lecun_normal(), (self.experts, 4 * features, features))
        received = jnp.einsum("btec,btd->ebcd", sent, x)
        hidden = nn.gelu(jnp.einsum("ebcd,edf->ebcf", received, first))
        made = jnp.einsum("btec,ebcd->btd", combined, jnp.einsum("ebcf,efd->ebcd", hidden, second))
        balance = self.experts * jnp.sum(gates.mean((0, 1)) * chosen[:, :, 0].mean((0, 1)))
        return made, balance


class SparseTransformer(nn.Module):
    """A causal Transformer with experts for its dense layers."""

    features: int = 128
    depth: int = 3
    words: int = 2048

    @nn.compact
    def __call__(self, read: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = self.param("positions", nn.initializers.normal(0.02), (read.shape[1], self.features))
        x = nn.Embed(self.words, self.features)(read) + positions
        mask = nn.make_causal_mask(read)
        balance: Any = 0.0
        for _ in range(self.depth):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            made, balance_here = MixtureOfExperts()(nn.LayerNorm()(x))
            x = x + made
            balance += balance_here
        return nn.Dense(self.words, use_bias=False)(nn.LayerNorm()(x)), balance


def moe() -> Unseen:
    """A mixture of experts, with the loss that balances them (Fedus et al. 2021)."""

    def loss(made: tuple[jax.Array, jax.Array], read: jax.Array) -> jax.Array:
        logits, balance = made
        return next_token(logits, read) + 0.01 * balance

    return step_of(SparseTransformer(), tokens(8, 256), loss, optax.adamw(1e-3))


class TransformerBody(nn.Module):
    """A causal Transformer without its last layer."""

    features: int = 128
    depth: int = 3
    words: int = 16384

    @nn.compact
    def __call__(self, read: jax.Array) -> jax.Array:
        x = nn.Embed(self.words, self.features, name="words")(read)
        mask = nn.make_causal_mask(read)
        for _ in range(self.depth):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
            x = x + nn.Dense(self.features)(nn.gelu(nn.Dense(4 * self.features)(nn.LayerNorm()(x))))
        return nn.LayerNorm()(x)


def chunked_loss() -> Unseen:
    """A language model whose logits are made, and made again, for one chunk of the tokens at a time."""
    body: Any = TransformerBody()
    chunks, read = 8, tokens(8, 256)

    def loss(params: Any, read: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = body.apply(params, read).reshape(chunks, -1, body.features)
        words = params["params"]["words"]["embedding"]

        @jax.checkpoint
        def loss_of(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            return cross_entropy(chunk[0] @ words.T, chunk[1]).sum()

        return lax.map(loss_of, (hidden, labels.reshape(chunks, -1))).sum() / labels.size

    return with_state(loss, jax.eval_shape(body.init, RAW_KEY, read), optax.adamw(1e-3), read, read)


class MambaBlock(nn.Module):
    """A selective state space (Gu & Dao 2023) by an associative scan; parameters are named as there."""

    features: int
    states: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide, rank, states = 2 * self.features, self.features // 16, self.states
        u, gate = jnp.split(nn.Dense(2 * wide, use_bias=False)(nn.RMSNorm()(x)), 2, -1)
        u = nn.silu(nn.Conv(wide, (4,), padding="CAUSAL", feature_group_count=wide)(u))
        step, inward, outward = jnp.split(nn.Dense(rank + 2 * states, use_bias=False)(u), [rank, rank + states], -1)
        step = nn.softplus(nn.Dense(wide)(step))
        rates = -jnp.exp(self.param("A_log", nn.initializers.zeros, (wide, states)))
        skip = self.param("D", nn.initializers.ones, (wide,))
        decay = jnp.exp(step[..., None] * rates)
        entering = (step * u)[..., None] * inward[:, :, None]
        _, hidden = lax.associative_scan(
            lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]), (decay, entering), axis=1
        )
        y = jnp.einsum("btdn,btn->btd", hidden, outward) + skip * u
        return x + nn.Dense(self.features, use_bias=False)(y * nn.silu(gate))


class Mamba(nn.Module):
    """Blocks of state spaces between tied embeddings."""

    features: int = 64
    states: int = 16
    depth: int = 2
    words: int = 1024

    @nn.compact
    def __call__(self, read: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.words, self.features)
        x = embedding(read)
        for _ in range(self.depth):
            x = MambaBlock(self.features, self.states)(x)
        return embedding.attend(nn.RMSNorm()(x))


def mamba() -> Unseen:
    """A language model of selective state spaces."""
    return step_of(Mamba(), tokens(4, 256), next_token, optax.adamw(1e-3))
