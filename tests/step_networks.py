"""Small networks as plain functions of parameter trees, for the cases in `training_steps.py`."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = Any
Activation = Callable[[jax.Array], jax.Array]


def weights(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Normal weights (..., outputs), scaled by the number of inputs of each output."""
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)


def dense_params(rng: np.random.Generator, inputs: int, outputs: int) -> Params:
    return {"w": weights(rng, inputs, outputs), "b": jnp.zeros(outputs)}


def dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def mlp_params(rng: np.random.Generator, sizes: list[int]) -> Params:
    return [dense_params(rng, inputs, outputs) for inputs, outputs in pairwise(sizes)]


def mlp(params: Params, x: jax.Array, activation: Activation = jnp.tanh) -> jax.Array:
    """(batch, inputs) → (batch, outputs); the last layer is linear."""
    for layer in params[:-1]:
        x = activation(dense(layer, x))
    return dense(params[-1], x)


def step_with(activation: Activation, rate: float = 0.1) -> Callable[[Params, jax.Array], tuple[Params, jax.Array]]:
    """A step of an `mlp`."""

    def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        """One step of gradient descent."""
        value, grads = jax.value_and_grad(lambda params: jnp.mean(mlp(params, x, activation) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step


sine_step = step_with(jnp.sin)
"""Each layer has a residual worth computing again."""


def sine_arguments(width: int, layers: int, batch: int) -> tuple[Params, jax.Array]:
    """Those of `sine_step`, the same every time."""
    params = mlp_params(np.random.default_rng(0), [width] * (layers + 1))
    return params, jnp.asarray(np.random.default_rng(1).normal(size=(batch, width)), jnp.float32)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """(batch, h, w, c) with (3, 3, c, features) → (batch, h / stride, w / stride, features)."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(params: Params, stats: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    """Ioffe & Szegedy, arXiv 1502.03167, in training; also the new running mean and variance."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    running = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
    return (x - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["bias"], running


def conv_net_params(rng: np.random.Generator, width: int, blocks: int, classes: int) -> tuple[Params, Params]:
    """Parameters and running statistics of `conv_net`."""
    norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    stat = {"mean": jnp.zeros(width), "var": jnp.ones(width)}
    params = {
        "stem": weights(rng, 3, 3, 3, width),
        "blocks": [
            {"convs": [weights(rng, 3, 3, width, width) for _ in range(2)], "norms": [norm, norm]}
            for _ in range(blocks)
        ],
        "head": dense_params(rng, width, classes),
    }
    return jax.tree.map(jnp.copy, (params, [[stat, stat] for _ in range(blocks)]))


def conv_net(params: Params, stats: Params, images: jax.Array) -> tuple[jax.Array, Params]:
    """Residual blocks at full resolution (He et al., arXiv 1512.03385): (batch, h, w, 3) → (batch, classes)."""
    x = conv(images, params["stem"])
    running = []
    for block, block_stats in zip(params["blocks"], stats, strict=True):
        y, first = batch_norm(block["norms"][0], block_stats[0], conv(x, block["convs"][0]))
        y, second = batch_norm(block["norms"][1], block_stats[1], conv(jax.nn.relu(y), block["convs"][1]))
        x = jax.nn.relu(x + y)
        running.append([first, second])
    return dense(params["head"], x.mean((1, 2))), running


def u_net_params(rng: np.random.Generator, width: int, levels: int) -> Params:
    widths = [width * 2**level for level in range(levels)]
    down = [[weights(rng, 3, 3, w // 2 if level else 1, w), weights(rng, 3, 3, w, w)] for level, w in enumerate(widths)]
    up = [[weights(rng, 3, 3, 3 * w, w), weights(rng, 3, 3, w, w)] for w in widths[:-1]]
    return {"down": down, "up": up, "head": weights(rng, 3, 3, width, 1)}


def u_net(params: Params, images: jax.Array) -> jax.Array:
    """Ronneberger et al., arXiv 1505.04597: (batch, h, w, 1) → (batch, h, w, 1), a long skip at every level."""
    x, skips = images, []
    for level, kernels in enumerate(params["down"]):
        if level:
            skips.append(x)
            batch, height, width, channels = x.shape
            x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))
        for kernel in kernels:
            x = jax.nn.silu(conv(x, kernel))
    for kernels, skip in zip(reversed(params["up"]), reversed(skips), strict=True):
        x = jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skip], -1)
        for kernel in kernels:
            x = jax.nn.silu(conv(x, kernel))
    return conv(x, params["head"])


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Ba et al., arXiv 1607.06450, over the last axis, in float32."""
    h = x.astype(jnp.float32)
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return (h * params["scale"] + params["bias"]).astype(x.dtype)


def transformer_params(rng: np.random.Generator, width: int, layers: int, vocabulary: int, time: int) -> Params:
    def block() -> Params:
        return {
            "norms": [{"scale": jnp.ones(width), "bias": jnp.zeros(width)} for _ in range(2)],
            "qkv": dense_params(rng, width, 3 * width),
            "out": dense_params(rng, width, width),
            "up": dense_params(rng, width, 4 * width),
            "down": dense_params(rng, 4 * width, width),
        }

    return {
        "tokens": weights(rng, vocabulary, width),
        "positions": weights(rng, time, width),
        "blocks": [block() for _ in range(layers)],
        "head": dense_params(rng, width, vocabulary),
    }


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Dropout = Callable[[jax.Array, jax.Array | None], jax.Array]


def attention_weights(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Causal attention weights (batch, heads, time, time) and the log of their normaliser (..., time, 1)."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    normaliser = jax.nn.logsumexp(scores, -1, keepdims=True)
    return jnp.exp(scores - normaliser), normaliser


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Vaswani et al., arXiv 1706.03762: three times (batch, time, heads, d) → (batch, time, heads, d)."""
    return jnp.einsum("bhts,bshd->bthd", attention_weights(q, k)[0].astype(v.dtype), v)


@jax.custom_vjp
def hand_written_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`plain_attention` that keeps no (time, time) weights, as FlashAttention does (Dao et al., arXiv 2205.14135)."""
    return plain_attention(q, k, v)


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    attended, normaliser = attention_weights(q, k)
    out = jnp.einsum("bhts,bshd->bthd", attended, v)
    return out, (q, k, v, out, normaliser)


def _attention_backward(residuals: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, out, normaliser = residuals
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    attended = jnp.exp(scores - normaliser)
    d_attended = jnp.einsum("bthd,bshd->bhts", d_out, v)
    mean = jnp.einsum("bthd,bthd->bht", d_out, out)[..., None]
    d_scores = attended * (d_attended - mean) * scale
    d_q = jnp.einsum("bhts,bshd->bthd", d_scores, k)
    d_k = jnp.einsum("bhts,bthd->bshd", d_scores, q)
    return d_q, d_k, jnp.einsum("bhts,bthd->bshd", attended, d_out)


hand_written_attention.defvjp(_attention_forward, _attention_backward)


def dropout(x: jax.Array, key: jax.Array | None, rate: float = 0.1) -> jax.Array:
    """Srivastava et al., JMLR 15 (2014); without a key the identity."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def transformer_block(
    params: Params, x: jax.Array, key: jax.Array | None = None, attention: Attention = plain_attention, heads: int = 4
) -> jax.Array:
    """One pre-norm block: (batch, time, width) → (batch, time, width)."""
    keys = (None, None) if key is None else tuple(jax.random.split(key))
    batch, time, width = x.shape
    qkv = dense(params["qkv"], layer_norm(params["norms"][0], x)).reshape(batch, time, 3, heads, width // heads)
    mixed = attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(batch, time, width)
    x = x + dropout(dense(params["out"], mixed), keys[0])
    hidden = jax.nn.gelu(dense(params["up"], layer_norm(params["norms"][1], x)))
    return x + dropout(dense(params["down"], hidden), keys[1])


def transformer(
    params: Params, tokens: jax.Array, key: jax.Array | None = None, block: Callable[..., jax.Array] = transformer_block
) -> jax.Array:
    """Decoder with unrolled blocks: (batch, time) → logits (batch, time, vocabulary)."""
    x = params["tokens"][tokens] + params["positions"]
    for index, block_params in enumerate(params["blocks"]):
        x = block(block_params, x, None if key is None else jax.random.fold_in(key, index))
    return dense(params["head"], x)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of predicting each token from those before it."""
    log_probabilities = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], -1).mean()


def random_wiring(rng: np.random.Generator, nodes: int) -> list[list[int]]:
    """Inputs of every node of a random acyclic graph (Xie et al., arXiv 1904.01569), near ones more likely."""
    return [
        sorted({node - 1, *(int(node - 1 - rng.geometric(0.3) % node) for _ in range(2))} & set(range(node)))
        for node in range(1, nodes + 1)
    ]


def randomly_wired(params: Params, wiring: list[list[int]], x: jax.Array) -> jax.Array:
    """(batch, width) → (batch, width): each node mixes its inputs by learned weights, then a dense layer."""
    values, used = [x], set()
    for node, inputs in zip(params, wiring, strict=True):
        used.update(inputs)
        mixed = sum(jax.nn.sigmoid(gate) * values[i] for gate, i in zip(node["gates"], inputs, strict=True))
        values.append(dense(node["dense"], jax.nn.gelu(mixed)))
    return sum(value for i, value in enumerate(values) if i not in used)


half_precision = partial(jax.tree.map, lambda leaf: leaf.astype(jnp.bfloat16))
