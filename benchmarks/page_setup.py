"""The small step that the pages' examples speak of: `train_step(state, batch)` and what goes with it."""

import os

from benchmarks import devices_on_cpu

os.environ.update(devices_on_cpu.environment(8))
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import remat_opt

LAYERS, WIDTH = 4, 128


class State(NamedTuple):
    """Parameters and the optimizer's state."""

    params: Any
    moments: optax.OptState


def loss_fn(params, batch):
    """A residual network of two products a layer."""
    hidden = batch
    for layer, (up, down) in enumerate(params):
        with jax.named_scope(f"layer{layer}"):
            hidden = hidden + jax.nn.gelu(hidden @ up) @ down
    return jnp.mean(hidden**2)


optimizer = optax.adam(1e-3)


def train_step(state, batch):
    """A whole step: gradients and the update."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, moments = optimizer.update(grads, state.moments, state.params)
    return State(optax.apply_updates(state.params, updates), moments), loss


class Network(linen.Module):
    """A module of Flax linen."""

    @linen.compact
    def __call__(self, x):
        """Of rows."""
        return linen.Dense(WIDTH)(x)


class Trainer:
    """An object with a step."""

    @staticmethod
    def train_step(state, batch):
        """As above."""
        return train_step(state, batch)


def new_state():
    """Small random weights, before the first step."""
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    ups = [0.1 * jax.random.normal(key, (WIDTH, 4 * WIDTH)) for key in keys[:LAYERS]]
    downs = [0.1 * jax.random.normal(key, (4 * WIDTH, WIDTH)) for key in keys[LAYERS:]]
    params = list(zip(ups, downs, strict=True))
    return State(params, optimizer.init(params))


def make_args(batch):
    """What the step takes for so many rows."""
    return new_state(), jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)


def names() -> dict[str, Any]:
    """What the blocks of a page may use without defining it; arrays are new, as a page may donate them."""
    state = new_state()
    return {
        "Network": Network,
        "dataclasses": dataclasses,
        "eqx": eqx,
        "jax": jax,
        "jnp": jnp,
        "loss_fn": loss_fn,
        "make_args": make_args,
        "new_state": new_state,
        "nnx": nnx,
        "optax": optax,
        "params": state.params,
        "remat_opt": remat_opt,
        "state": state,
        "batch": jax.random.normal(jax.random.key(99), (4096, WIDTH)),
        "train_step": train_step,
        "trainer": Trainer(),
    }
