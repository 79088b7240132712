"""Language models."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from benchmarks.held_out import floats, next_token, step_of, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, sinusoids, updated, with_state

DenseGeneral = partial(nn.DenseGeneral, use_bias=False)


def root_mean_square(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Normalised in float32, whatever the precision around it."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def rotated(x: jax.Array) -> jax.Array:
    """Positions as rotations of pairs of features (Su et al. 2021)."""
    _, length, _, size = x.shape
    frequencies = 1e4 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None] * frequencies[None]
    cosines, sines = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1).astype(x.dtype)


def llama_block(x: jax.Array, layer: dict[str, jax.Array], mask: jax.Array, heads: int, key_heads: int) -> jax.Array:
    """Rotated attention of few keys for many queries, and gated dense layers."""
    y = root_mean_square(x, layer["norm1"])
    batch, length, features = y.shape
    size = features // heads
    queries = rotated((y @ layer["query"]).reshape(batch, length, heads, size))
    keys = rotated((y @ layer["key"]).reshape(batch, length, key_heads, size))
    values = (y @ layer["value"]).reshape(batch, length, key_heads, size)
    keys, values = (jnp.repeat(shared, heads // key_heads, 2) for shared in (keys, values))
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys).astype(jnp.float32) / math.sqrt(size)
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(batch, length, features) @ layer["out"]
    y = root_mean_square(x, layer["norm2"])
    return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


def llama() -> Unseen:
    """Llama (Touvron et al. 2023) in plain JAX: bfloat16 copies of float32 parameters, clipping, a z-loss."""
    features, heads, key_heads, wide, words = 256, 8, 2, 704, 8192
    layer = {
        **{name: floats(features) for name in ("norm1", "norm2")},
        **{name: floats(features, features) for name in ("query", "out")},
        **{name: floats(features, features // heads * key_heads) for name in ("key", "value")},
        **{name: floats(features, wide) for name in ("gate", "up")},
        "down": floats(wide, features),
    }
    params = {
        "embedding": floats(words, features),
        "final_norm": floats(features),
        "head": floats(features, words),
        "layers": [layer] * 4,
    }
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 10, 1000)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))

    def loss(params: Any, read: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        x = narrow["embedding"][read[:, :-1]]
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        for layer in narrow["layers"]:
            x = llama_block(x, layer, mask, heads, key_heads)
        logits = (root_mean_square(x, narrow["final_norm"]) @ narrow["head"]).astype(jnp.float32)
        normalizer = jax.nn.logsumexp(logits, -1)
        chosen = jnp.take_along_axis(logits, read[:, 1:, None], -1)[..., 0]
        return (normalizer - chosen).mean() + 1e-4 * (normalizer**2).mean()

    def step(state: dict[str, Any], read: jax.Array) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(loss)(state["params"], read)
        params, optimizer_state = updated(optimizer, gradients, state["optimizer"], state["params"])
        report = {"loss": value, "gradient_norm": optax.global_norm(gradients)}
        return {"params": params, "optimizer": optimizer_state}, report

    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    return Unseen(step, (state, tokens(4, 513)))


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

    return Unseen(*step_of(SparseTransformer(), tokens(8, 256), loss, optax.adamw(1e-3)), (0, 1))


def normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Layer normalisation without a bias."""
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gain


def shifted(scores: jax.Array) -> jax.Array:
    """Scores of relative positions, each row moved to where its query stands."""
    batch, heads, queries, keys = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(batch, heads, keys + 1, queries)
    return padded[:, :, 1:].reshape(batch, heads, queries, keys)


def transformer_xl_block(
    x: jax.Array, layer: dict[str, jax.Array], memory: jax.Array, offsets: jax.Array, mask: jax.Array
) -> jax.Array:
    """Attention to what is read and what is remembered, by content and by relative position; `u` and `v` as there."""
    seen = jnp.concatenate([memory, x], 1)
    queries = jnp.einsum("btd,dhk->bthk", x, layer["query"])
    both = jnp.einsum("btd,dshk->sbthk", seen, layer["keys_values"])
    relative = jnp.einsum("td,dhk->thk", offsets, layer["relative"])
    by_content = jnp.einsum("bqhk,bmhk->bhqm", queries + layer["u"], both[0])
    by_position = shifted(jnp.einsum("bqhk,mhk->bhqm", queries + layer["v"], relative))
    scores = jnp.where(mask, (by_content + by_position) / math.sqrt(queries.shape[-1]), -1e30)
    attended = jnp.einsum("bhqm,bmhk->bqhk", jax.nn.softmax(scores), both[1])
    x = normalized(x + jnp.einsum("bqhk,hkd->bqd", attended, layer["out"]), layer["gain1"])
    hidden = jax.nn.relu(x @ layer["feed1"] + layer["bias1"])
    return normalized(x + hidden @ layer["feed2"] + layer["bias2"], layer["gain2"])


def transformer_xl() -> Unseen:
    """Transformer-XL (Dai et al. 2019) in plain JAX: the state has the memory of the segment before."""
    batch, length, remembered, features, depth, heads = 8, 192, 192, 128, 3, 4
    size = features // heads
    layer = {
        **{name: floats(features, heads, size) for name in ("query", "relative")},
        "keys_values": floats(features, 2, heads, size),
        "out": floats(heads, size, features),
        **{name: floats(heads, size) for name in ("u", "v")},
        "feed1": floats(features, 4 * features),
        "bias1": floats(4 * features),
        "feed2": floats(4 * features, features),
        **{name: floats(features) for name in ("bias2", "gain1", "gain2")},
    }
    params = {"embedding": floats(2000, features), "layers": [layer] * depth}
    optimizer = optax.chain(optax.clip_by_global_norm(0.25), optax.adam(2.5e-4))

    def loss(params: Any, memories: list[jax.Array], read: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        x = params["embedding"][read[:, :-1]]
        offsets = sinusoids(jnp.arange(length + remembered - 1, -1, -1), features)
        mask = jnp.arange(length + remembered)[None] <= jnp.arange(length)[:, None] + remembered
        kept = []
        for layer, memory in zip(params["layers"], memories, strict=True):
            kept.append(lax.stop_gradient(jnp.concatenate([memory, x], 1)[:, -remembered:]))
            x = transformer_xl_block(x, layer, lax.stop_gradient(memory), offsets, mask)
        found = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.take_along_axis(found, read[:, 1:, None], -1).mean(), kept

    def step(state: dict[str, Any], read: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        (value, memory), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], state["memory"], read)
        params, optimizer_state = updated(optimizer, gradients, state["optimizer"], state["params"])
        return {"params": params, "optimizer": optimizer_state, "memory": memory}, value

    memory = [floats(batch, remembered, features)] * depth
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params), "memory": memory}
    return Unseen(step, (state, tokens(batch, length + 1)))


def buckets(length: int, both_sides: bool) -> jax.Array:
    """Relative positions, exact where near, in buckets of growing width where far."""
    relative = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    count, offset = 32, 0
    if both_sides:
        count //= 2
        offset = (relative > 0) * count
        relative = jnp.abs(relative)
    else:
        relative = -jnp.minimum(relative, 0)
    near = count // 2
    steps = jnp.log(jnp.maximum(relative, 1) / near) / math.log(128 / near) * near
    far = near + steps.astype(jnp.int32)
    return offset + jnp.where(relative < near, relative, jnp.minimum(far, count - 1))


class BiasedAttention(nn.Module):
    """Attention with a bias for scores and no scale."""

    features: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array) -> jax.Array:
        shape = (self.heads, self.features // self.heads)
        queries = DenseGeneral(shape, name="query")(x)
        keys = DenseGeneral(shape, name="key")(memory)
        values = DenseGeneral(shape, name="value")(memory)
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", queries, keys) + bias)
        weights = nn.Dropout(0.1, deterministic=False)(weights)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, values)
        return DenseGeneral(self.features, axis=(-2, -1), name="out")(attended)


class GatedDense(nn.Module):
    """Dense layers gated by GELU (Shazeer 2020)."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(DenseGeneral(4 * self.features)(x)) * DenseGeneral(4 * self.features)(x)
        return DenseGeneral(self.features)(nn.Dropout(0.1, deterministic=False)(hidden))


class EncoderDecoder(nn.Module):
    """T5 (Raffel et al. 2020), smaller: relative positions in buckets, tied embeddings."""

    features: int = 128
    heads: int = 4
    depth: int = 2
    words: int = 4096

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.words, self.features)
        x = embedding(source)
        padding = jnp.where(source > 0, 0.0, -1e9)[:, None, None]
        near = buckets(source.shape[1], True)
        bias = nn.Embed(32, self.heads, name="encoder_bias")(near).transpose(2, 0, 1)[None]
        for _ in range(self.depth):
            y = nn.RMSNorm()(x)
            x = x + BiasedAttention(self.features, self.heads)(y, y, bias + padding)
            x = x + GatedDense(self.features)(nn.RMSNorm()(x))
        memory = nn.RMSNorm()(x)
        x = embedding(jnp.pad(target[:, :-1], ((0, 0), (1, 0))))
        near = buckets(target.shape[1], False)
        bias = nn.Embed(32, self.heads, name="decoder_bias")(near).transpose(2, 0, 1)[None]
        bias = bias + jnp.where(jnp.tril(jnp.ones_like(near, bool)), 0.0, -1e9)
        for _ in range(self.depth):
            y = nn.RMSNorm()(x)
            x = x + BiasedAttention(self.features, self.heads)(y, y, bias)
            x = x + BiasedAttention(self.features, self.heads)(nn.RMSNorm()(x), memory, padding)
            x = x + GatedDense(self.features)(nn.RMSNorm()(x))
        return embedding.attend(nn.RMSNorm()(x) * self.features**-0.5)


def t5() -> Unseen:
    """An encoder and a decoder with dropout, trained by Adafactor (Shazeer & Stern 2018), padding left out."""
    model: Any = EncoderDecoder()
    optimizer = optax.adafactor(1e-3)
    source, target = tokens(8, 192), tokens(8, 96)

    def loss(params: Any, key: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        losses = cross_entropy(model.apply(params, source, target, rngs={"dropout": key}), target)
        weights = target > 0
        return (losses * weights).sum() / weights.sum()

    def step(state: dict[str, Any], source: jax.Array, target: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        key, used = jax.random.split(state["key"])
        value, gradients = jax.value_and_grad(loss)(state["params"], used, source, target)
        params, optimizer_state = updated(optimizer, gradients, state["optimizer"], state["params"])
        return {"params": params, "optimizer": optimizer_state, "key": key}, value

    params = jax.eval_shape(model.init, {"params": RAW_KEY, "dropout": RAW_KEY}, source, target)
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params), "key": RAW_KEY}
    return Unseen(step, (state, source, target))


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
    return Unseen(*step_of(Mamba(), tokens(4, 256), next_token, optax.adamw(1e-3)), (0, 1))
