"""Looped training steps of fixed sizes, on which memory and FLOPs have been compared since the project began.

`NETWORKS[name]()` gives a step `(state, inputs, targets) → (state, loss)` and its abstract arguments; the state is
donated. Nothing but jax.numpy, so that no module system decides how a loop is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Step = tuple[Callable[..., Any], tuple]


def gpt(*, layers: int = 12, time: int = 512, batch: int = 8, vocabulary: int = 8192, scan: bool = True) -> Step:
    """A causal transformer of width 512 with 8 heads: float32 parameters, bfloat16 products, adamw.

    Args:
        layers: stacked parameters in any case; a Python loop takes them apart.
        time: tokens in a sequence.
        batch: sequences.
        vocabulary: different tokens; the embedding is the last layer, too.
        scan: one loop over the layers instead of a Python loop.
    """
    width, heads = 512, 8
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    stack = {name: (layers, *shape) for name, shape in sizes.items()}
    stack |= {f"{name}_bias": (layers, shape[-1]) for name, shape in sizes.items()}
    stack |= dict.fromkeys(("gain1", "bias1", "gain2", "bias2"), (layers, width))
    params = {
        "stack": jax.tree.map(lambda shape: _floats(*shape), stack, is_leaf=lambda leaf: isinstance(leaf, tuple)),
        "embedding": _floats(vocabulary, width),
        "positions": _floats(time, width),
        "gain": _floats(width),
        "bias": _floats(width),
    }

    def loss(params, tokens, targets):
        x = (params["embedding"][tokens] + params["positions"]).astype(jnp.bfloat16)
        if scan:
            x, _ = lax.scan(lambda x, layer: (_block(layer, x, heads), None), x, params["stack"])
        else:
            for number in range(layers):
                x = _block(jax.tree.map(lambda leaf, number=number: leaf[number], params["stack"]), x, heads)
        x = _normalised(x, params["gain"], params["bias"])
        return _cross_entropy((x @ params["embedding"].T.astype(x.dtype)).astype(jnp.float32), targets)

    tokens = jax.ShapeDtypeStruct((batch, time), jnp.int32)
    return _training(loss, optax.adamw(1e-3), params, tokens, tokens)


def recurrent(gates: int, *, time: int = 1024) -> Step:
    """One layer of 512 units over 64 sequences of 64 figures, of which the last state is read; float32, adam.

    Args:
        gates: 4 for Hochreiter & Schmidhuber's LSTM, 3 for the GRU of Cho et al.
        time: steps of the loop.
    """
    width, batch, inputs, classes = 512, 64, 64, 16
    params = {
        "input": _floats(inputs, gates * width),
        "hidden": _floats(width, gates * width),
        "bias": _floats(gates * width),
        "classes": _floats(width, classes),
    }
    cell = _lstm_cell if gates == 4 else _gru_cell

    def loss(params, frames, targets):
        zeros = jnp.zeros((batch, width))
        carry = (zeros, zeros) if gates == 4 else (zeros,)
        carry, _ = lax.scan(lambda carry, x: (cell(params, carry, x), None), carry, frames)
        return _cross_entropy(carry[0] @ params["classes"], targets)

    targets = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return _training(loss, optax.adam(1e-3), params, _floats(time, batch, inputs), targets)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _normalised(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5) * gain + bias).astype(x.dtype)


def _dense(layer: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    return x @ layer[name].astype(x.dtype) + layer[f"{name}_bias"].astype(x.dtype)


def _block(layer: dict[str, jax.Array], x: jax.Array, heads: int) -> jax.Array:
    """Attention and feed-forward, each after layer norm and added to its input."""
    batch, time, width = x.shape
    projected = _dense(layer, "qkv", _normalised(x, layer["gain1"], layer["bias1"]))
    query, key, value = (part.reshape(batch, time, heads, width // heads) for part in jnp.split(projected, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / (width // heads) ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e30)).astype(x.dtype)
    x = x + _dense(layer, "out", jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))
    return x + _dense(layer, "down", jax.nn.gelu(_dense(layer, "up", _normalised(x, layer["gain2"], layer["bias2"]))))


def _lstm_cell(params: dict[str, jax.Array], carry: tuple, x: jax.Array) -> tuple:
    hidden, memory = carry
    gates = x @ params["input"] + hidden @ params["hidden"] + params["bias"]
    enter, forget, new, leave = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jax.nn.sigmoid(leave) * jnp.tanh(memory), memory


def _gru_cell(params: dict[str, jax.Array], carry: tuple, x: jax.Array) -> tuple:
    (hidden,) = carry
    of_input = jnp.split(x @ params["input"] + params["bias"], 3, -1)
    of_hidden = jnp.split(hidden @ params["hidden"], 3, -1)
    reset = jax.nn.sigmoid(of_input[0] + of_hidden[0])
    keep = jax.nn.sigmoid(of_input[1] + of_hidden[1])
    return ((1 - keep) * jnp.tanh(of_input[2] + reset * of_hidden[2]) + keep * hidden,)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def _training(loss: Callable[..., jax.Array], optimizer: Any, params: Any, *data: Any) -> Step:
    def train_step(state, inputs, targets):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return train_step, ((params, jax.eval_shape(optimizer.init, params)), *data)


NETWORKS: dict[str, Callable[[], Step]] = {
    "gpt": gpt,
    "gpt, Python loop": partial(gpt, scan=False),
    "deep gpt": partial(gpt, layers=64, time=128, batch=32, vocabulary=512),
    "lstm": partial(recurrent, 4),
    "gru": partial(recurrent, 3),
    "lstm, 256 steps": partial(recurrent, 4, time=256),
    "lstm, 4096 steps": partial(recurrent, 4, time=4096),
}
