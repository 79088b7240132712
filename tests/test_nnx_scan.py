"""Layers of a flax nnx module in a `scan` under `nnx.remat`, whose state comes out of the loop and is updated."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import remat_opt

DEPTH, WIDTH, BATCH = 4, 8, 64


class Layer(nnx.Module):
    """A dense block with batch norm (state), dropout (random stream) and a metric."""

    def __init__(self, rngs: nnx.Rngs):
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.activity = nnx.metrics.Average()

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.gelu(self.wide(self.norm(x)))
        self.activity.update(values=jnp.abs(h))
        return x + self.dropout(self.narrow(h))


class Network(nnx.Module):
    """Stacks of layers, each of which runs in a loop of its own."""

    def __init__(self, rngs: nnx.Rngs, stacks: int = 1, outputs: Callable = lambda x: x, out_axes=nnx.Carry):
        make = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Layer, in_axes=0, out_axes=0))
        self.stacks = nnx.List([make(rngs) for _ in range(stacks)])
        self.outputs, self.out_axes = outputs, out_axes

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nnx.remat(lambda x, layer: layer(x))
        turn = nnx.scan(lambda x, one: self.outputs(layer(x, one)), in_axes=(nnx.Carry, 0), out_axes=self.out_axes)
        for stack in self.stacks:
            x = jax.tree.leaves(turn(x, stack))[0]
        return x


NETWORKS = {
    "one stack": Network,
    "two stacks, every layer's result": lambda rngs: Network(rngs, 2, lambda x: (x, x), (nnx.Carry, 0)),
}


def train(make: Callable, jit: Callable, steps: int = 2) -> tuple[list, list]:
    """The state of a network and its optimizer after some steps, and the losses."""
    model = make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @jit
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    losses = [step(model, optimizer, x) for _ in range(steps)]
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)], losses


@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_the_same(name: str) -> None:
    expected, losses = train(NETWORKS[name], nnx.jit)
    found, ours = train(NETWORKS[name], lambda step: remat_opt.optimize(nnx.jit(step), verify=False))
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
