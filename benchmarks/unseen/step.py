"""What the steps have in common: their form, and the usual ways from a loss to a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

RAW_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Unseen(NamedTuple):
    """A step, and which of its arguments it donates; nothing is allocated."""

    step: Callable[..., Any]
    abstract_args: tuple
    donate_argnums: tuple[int, ...] = (0,)


def updated(optimizer: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Parameters and the optimiser's state after the gradients."""
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def with_state(loss: Callable, params: Any, optimizer: Any, *batch: Any) -> Unseen:
    """The step of a `loss` of parameters and a batch, which donates one pair: parameters and optimiser state."""

    def step(state: tuple[Any, Any], *batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
        params, optimizer_state = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return updated(optimizer, gradients, optimizer_state, params), value

    return Unseen(step, ((params, jax.eval_shape(optimizer.init, params)), *batch))


def with_arguments(loss: Callable, params: Any, optimizer: Any, *batch: Any) -> Unseen:
    """The same, which donates its first two arguments."""

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return *updated(optimizer, gradients, state, params), value

    return Unseen(step, (params, jax.eval_shape(optimizer.init, params), *batch), (0, 1))


def sinusoids(positions: jax.Array, features: int) -> jax.Array:
    """Positions as sines and cosines of falling frequency (Vaswani et al. 2017)."""
    frequencies = jnp.exp(-math.log(1e4) * jnp.arange(features // 2) / (features // 2))
    angles = positions[:, None].astype(jnp.float32) * frequencies[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def next_token(logits: jax.Array, read: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], read[:, 1:]).mean()


def step_of(network: nn.Module, inputs: jax.ShapeDtypeStruct, loss: Callable, optimizer: Any = None) -> Unseen:
    """The usual step of a network; `loss` has what the network gives and the inputs. SGD with momentum by default."""
    chosen = optimizer or optax.sgd(0.1, momentum=0.9)
    params = jax.eval_shape(network.init, jax.random.key(0), inputs)

    def step(params: Any, state: Any, inputs: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda params: loss(network.apply(params, inputs), inputs))(params)
        updates, state = chosen.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return Unseen(step, (params, jax.eval_shape(chosen.init, params), inputs), (0, 1))
