"""Networks of sound, of games, of tables and pixels, and of more than one kind of input."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import RAW_KEY, Unseen, cross_entropy, updated, with_arguments, with_state


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


class ResettingCell(nn.Module):
    """A gated recurrent unit that forgets where a game is over."""

    features: int

    @nn.compact
    def __call__(self, carry: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, over = inputs
        return nn.GRUCell(self.features)(jnp.where(over[:, None], 0.0, carry), x)


class ActorCritic(nn.Module):
    """Convolutions, a recurrent core, and a head each for the actions and for the value."""

    features: int = 128
    actions: int = 6

    @nn.compact
    def __call__(self, observations: jax.Array, over: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = observations
        for count in (16, 32):
            x = nn.relu(nn.Conv(count, (3, 3), (2, 2))(x))
        x = nn.relu(nn.Dense(self.features)(x.reshape(*x.shape[:2], -1)))
        core = nn.scan(ResettingCell, variable_broadcast="params", split_rngs={"params": False})(self.features)
        _, y = core(jnp.zeros((x.shape[1], self.features)), (x, over))
        logits = nn.Dense(self.actions)(nn.tanh(nn.Dense(self.features)(y)))
        values = nn.Dense(1)(nn.tanh(nn.Dense(self.features)(y)))
        return logits, values[..., 0]


def advantages_of(played: dict[str, jax.Array]) -> jax.Array:
    """Generalised advantages (Schulman et al. 2016), from the end to the start."""

    def before(carry: tuple[jax.Array, jax.Array], here: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        advantage, next_value = carry
        over, reward, value = here
        surprise = reward + 0.99 * next_value * (1 - over) - value
        advantage = surprise + 0.99 * 0.95 * (1 - over) * advantage
        return (advantage, value), advantage

    values = played["value"]
    steps = played["done"].astype(jnp.float32), played["reward"], values
    _, advantages = lax.scan(before, (jnp.zeros_like(values[0]), values[-1]), steps, reverse=True, unroll=8)
    return advantages


def ppo() -> Unseen:
    """Proximal policy optimisation (Schulman et al. 2017), two epochs in a scan."""
    model: Any = ActorCritic()
    games = (128, 32)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))

    def loss(params: Any, played: dict[str, jax.Array], advantages: jax.Array, returns: jax.Array) -> jax.Array:
        logits, values = model.apply(params, played["observation"], played["done"])
        log_probabilities = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
        chosen = jnp.take_along_axis(log_probabilities, played["action"][..., None], -1)[..., 0]
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = jnp.exp(chosen - played["log_probability"])
        policy_loss = -jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled).mean()
        clipped = played["value"] + jnp.clip(values - played["value"], -0.2, 0.2)
        value_loss = 0.5 * jnp.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy_loss + 0.5 * value_loss - 0.01 * entropy

    def step(state: dict[str, Any], played: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        advantages = advantages_of(played)
        returns = advantages + played["value"]

        def epoch(state: dict[str, Any], _: None) -> tuple[dict[str, Any], jax.Array]:
            value, gradients = jax.value_and_grad(loss)(state["params"], played, advantages, returns)
            params, optimizer_state = updated(optimizer, gradients, state["optimizer"], state["params"])
            return {"params": params, "optimizer": optimizer_state}, value

        return lax.scan(epoch, state, None, length=2)

    played = {
        "observation": floats(*games, 16, 16, 3),
        "done": jax.ShapeDtypeStruct(games, jnp.bool_),
        "action": tokens(*games),
        **{name: floats(*games) for name in ("log_probability", "reward", "value")},
    }
    params = jax.eval_shape(model.init, RAW_KEY, played["observation"], played["done"])
    return Unseen(step, ({"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}, played))


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

        x, _ = lax.scan(advance, inputs @ params["read_in"], jnp.arange(steps) * size)
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


class Encoder(nn.Module):
    """Pre-normalised Transformer blocks with the sigmoid form of GELU."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
        y = nn.Dense(4 * self.features)(nn.LayerNorm()(x))
        x = x + nn.Dense(self.features)(y * nn.sigmoid(1.702 * y))
        return nn.LayerNorm()(x)


class ImagesAndTexts(nn.Module):
    """CLIP (Radford et al. 2021), smaller: how well each image fits each text."""

    features: int = 64
    words: int = 1000
    patch: int = 4

    @nn.compact
    def __call__(self, images: jax.Array, texts: jax.Array) -> jax.Array:
        window, initial = (self.patch, self.patch), nn.initializers.normal(0.02)
        x = nn.Conv(self.features, window, strides=window, use_bias=False)(images)
        x = x.reshape(x.shape[0], -1, self.features)
        token = self.param("class_token", initial, (1, 1, self.features))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.features)), x], 1)
        x = x + self.param("positions", initial, (x.shape[1], self.features))
        image = Encoder(self.features)(x)[:, 0]
        y = nn.Embed(self.words, self.features)(texts)
        y = y + self.param("text_positions", initial, (texts.shape[1], self.features))
        y = Encoder(self.features)(y, nn.make_causal_mask(texts))
        text = y[jnp.arange(texts.shape[0]), texts.argmax(-1)]
        image, text = (nn.Dense(self.features, use_bias=False)(found) for found in (image, text))
        image, text = (found / jnp.linalg.norm(found, axis=-1, keepdims=True) for found in (image, text))
        scale = self.param("scale", nn.initializers.constant(math.log(1 / 0.07)), ())
        return jnp.exp(scale) * image @ text.T


def clip() -> Unseen:
    """Images told apart by texts and texts by images."""
    model: Any = ImagesAndTexts()
    optimizer = optax.adamw(1e-3)
    batch = {"image": floats(2048, 16, 16, 3), "text": tokens(2048, 16)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores = model.apply(params, batch["image"], batch["text"])
        labels = jnp.arange(scores.shape[0])
        both = cross_entropy(scores, labels).mean() + cross_entropy(scores.T, labels).mean()
        return both / 2, (scores.argmax(-1) == labels).mean()

    def step(state: tuple[Any, Any], batch: dict[str, jax.Array]) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
        params, optimizer_state = state
        (value, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return updated(optimizer, gradients, optimizer_state, params), {"loss": value, "accuracy": accuracy}

    params = jax.eval_shape(model.init, RAW_KEY, batch["image"], batch["text"])
    return Unseen(step, ((params, jax.eval_shape(optimizer.init, params)), batch))
