"""`remat_opt.nnx.remat` in place of `flax.nnx.remat`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_close, checkpoints_in
from flax import nnx

import remat_opt
import remat_opt.nnx


class Network(nnx.Module):
    """Batch norm (state), dropout (random stream), a layer used twice (shared), and a counter that is set by Python."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(5)])
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(5)])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.again = self.layers[0]
        self.calls = 0

    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nnx.relu(norm(layer(x)))
        self.calls = self.calls + 1
        return scale * self.dropout(self.again(x))


def loss_of(model: Network, x: jax.Array, scale: float = 1.0) -> jax.Array:
    return (model(x, scale) ** 2).mean()


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (16, 8))


def train(loss: Any, x: jax.Array, steps: int = 2) -> tuple[Any, list[jax.Array]]:
    model = Network(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    losses = [step(model, optimizer, x) for _ in range(steps)]
    return nnx.state((model, optimizer)), losses


@pytest.mark.short
def test_training_is_the_same_state_and_random_streams_included(x: jax.Array) -> None:
    state, losses = train(remat_opt.nnx.remat(loss_of), x)
    expected_state, expected_losses = train(loss_of, x)
    assert_close(losses, expected_losses)
    assert_close(jax.tree.leaves(state), jax.tree.leaves(expected_state))


def test_the_function_is_divided(x: jax.Array) -> None:
    graph, state = nnx.split(Network(nnx.Rngs(0)))

    def pure(state, x):
        return remat_opt.nnx.remat(loss_of)(nnx.merge(graph, state, copy=True), x)

    assert checkpoints_in(pure, state, x) >= 2


def test_what_the_function_sets_by_python_is_set_outside(x: jax.Array) -> None:
    model = Network(nnx.Rngs(0))
    remat_opt.nnx.remat(loss_of)(model, x)
    assert model.calls == 1
    assert model.again is model.layers[0]


def test_a_method_of_a_layer_and_arguments_by_name(x: jax.Array) -> None:
    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x, flag=True, scale=2.0)
            return x

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        @partial(remat_opt.nnx.remat, static_argnames="flag")
        def __call__(self, x, *, flag: bool, scale: float):
            return x + scale * jnp.tanh(self.linear(x)) if flag else x

    model = Stack(nnx.Rngs(0))
    ours = nnx.grad(lambda model, x: model(x).sum())(model, x)

    class PlainBlock(Block):
        def __call__(self, x, *, flag, scale):
            return x + scale * jnp.tanh(self.linear(x))

    plain = Stack(nnx.Rngs(0))
    plain.blocks = nnx.List([PlainBlock(nnx.Rngs(0)) for _ in range(3)])
    for block, given in zip(plain.blocks, model.blocks, strict=True):
        nnx.update(block, nnx.state(given))
    assert_close(jax.tree.leaves(ours), jax.tree.leaves(nnx.grad(lambda model, x: model(x).sum())(plain, x)))


def test_static_arguments_by_number(x: jax.Array) -> None:
    def scaled(model, x, kind):
        return loss_of(model, x) if kind == "plain" else 3.0 * loss_of(model, x)

    recomputing = remat_opt.nnx.remat(scaled, static_argnums=2)
    plain = recomputing(Network(nnx.Rngs(0)), x, "plain")
    np.testing.assert_allclose(recomputing(Network(nnx.Rngs(0)), x, "other"), 3.0 * plain, rtol=1e-6)


def test_as_nnx_remat_it_takes_a_decorators_options_and_a_policy(x: jax.Array) -> None:
    @remat_opt.nnx.remat(prevent_cse=False, budget=0.5)
    def loss(model, x):
        return loss_of(model, x)

    expected = nnx.grad(loss_of)(Network(nnx.Rngs(0)), x)
    assert_close(jax.tree.leaves(nnx.grad(loss)(Network(nnx.Rngs(0)), x)), jax.tree.leaves(expected))
    policy = jax.checkpoint_policies.dots_saveable
    shared: dict[str, Any] = {"policy": policy, "graph": True, "graph_updates": True}
    graph, state = nnx.split(Network(nnx.Rngs(0)))
    texts = (
        str(jax.make_jaxpr(lambda state, f=f: f(nnx.merge(graph, state), x))(state))
        for f in (remat(loss_of, prevent_cse=False, **shared) for remat in (remat_opt.nnx.remat, nnx.remat))
    )
    assert len(set(texts)) == 1
    decorated = remat_opt.nnx.remat(**shared)(loss_of)
    assert_close(jax.tree.leaves(nnx.grad(decorated)(Network(nnx.Rngs(0)), x)), jax.tree.leaves(expected))
    with pytest.raises(ValueError, match=r"nnx\.compat\.remat"):  # flax's own refusal of shared nodes in a tree
        remat_opt.nnx.remat(loss_of, policy=policy, graph=False)(Network(nnx.Rngs(0)), x)
    with pytest.raises(ValueError, match="a policy or budget"):
        remat_opt.nnx.remat(loss_of, policy=policy, budget=0.5)
    with pytest.raises(ValueError, match="static_argnums"):
        remat_opt.nnx.remat(loss_of, policy=policy, static_argnames="x")


def test_a_bound_method_updates_its_module(x: jax.Array) -> None:
    ours, plain = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    assert_close(remat_opt.nnx.remat(ours.__call__)(x), plain(x))
    assert_close(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(plain)))
    assert ours.calls == 1


def test_without_differentiation_and_with_whole_modules_in_jit(x: jax.Array) -> None:
    forward = nnx.jit(remat_opt.nnx.remat(lambda model, x: model(x)))
    ours, plain = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    assert_close(forward(ours, x), nnx.jit(lambda model, x: model(x))(plain, x))
    assert_close(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(plain)))
