"""`optimize`, `frontier`, `measure`, `checkpoint` and `policy` take the same kinds of function."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import remat_opt.planner.step

pytestmark = pytest.mark.short

W = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)) / 16, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(128, 16)), jnp.float32)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = checkpoint_name(x + jnp.sin(x @ w), "layer")
    return jnp.mean(x**2)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(loss)(w, x)


def static_step(kind: str, w: jax.Array, x: jax.Array) -> jax.Array:
    assert kind == "train"
    return step(w, x)


class Trainer:
    """An object that JAX does not know: static, or closed over."""

    @functools.partial(jax.jit, static_argnums=0)
    def static(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    @functools.partial(jax.jit, static_argnames=("self", "kind"), donate_argnums=1)
    def named(self, w: jax.Array, x: jax.Array, kind: str = "") -> jax.Array:
        return static_step(kind, w, x)

    @eqx.filter_jit
    def filtered(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    @functools.partial(remat_opt.optimize, static_argnums=0)
    def optimized(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    @remat_opt.optimize
    @eqx.filter_jit
    def adapted(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    def plain(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """A pytree."""

    w: jax.Array

    @jax.jit
    def step(self, x: jax.Array) -> jax.Array:
        return step(self.w, x)


class Net(eqx.Module):
    """A pytree with a leaf that is no array."""

    w: jax.Array
    activation: Callable

    @eqx.filter_jit
    def step(self, x: jax.Array) -> jax.Array:
        return net_step(self, x).w


def net_loss(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = checkpoint_name(x + net.activation(x @ net.w), "layer")
    return jnp.mean(x**2)


def net_step(net: Net, x: jax.Array) -> Net:
    return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, eqx.filter_grad(net_loss)(net, x)))


class Kind(NamedTuple):
    """A step as a user has it, and what it is called with."""

    step: Any
    args: tuple = (W, X)
    kwargs: Mapping[str, Any] = MappingProxyType({})


trainer, net = Trainer(), Net(W, jnp.sin)
KINDS = {
    "plain": Kind(step),
    "jax.jit": Kind(jax.jit(step)),
    "static": Kind(jax.jit(static_step, static_argnums=0), ("train", W, X)),
    "static by name": Kind(jax.jit(static_step, static_argnames="kind"), (), {"kind": "train", "w": W, "x": X}),
    "nnx.jit": Kind(nnx.jit(step)),
    "eqx.filter_jit": Kind(eqx.filter_jit(step)),
    "leaves that are no arrays": Kind(eqx.filter_jit(net_step), (net, X)),
    "plain with such leaves": Kind(net_step, (net, X)),
    "self is static": Kind(trainer.static),
    "self is static by name": Kind(trainer.named, (W, X), {"kind": "train"}),
    "self is a pytree": Kind(Model(W).step, (X,)),
    "method under eqx.filter_jit": Kind(trainer.filtered),
    "method of an eqx.Module": Kind(net.step, (X,)),
    "optimized method": Kind(trainer.optimized),
    "optimized method under eqx.filter_jit": Kind(trainer.adapted),
    "callable object": Kind(trainer),
    "plain method": Kind(trainer.plain),
    "partial": Kind(functools.partial(step, x=X), (W,)),
    "partial of jax.jit": Kind(functools.partial(jax.jit(static_step, static_argnums=0), "train", x=X), (W,)),
    "partial of a method": Kind(functools.partial(trainer.static, W), (X,)),
    "partial of eqx.filter_jit": Kind(functools.partial(eqx.filter_jit(net_step), net), (X,)),
    "partial of an optimized one": Kind(functools.partial(remat_opt.optimize(step), W), (X,)),
}


def numbers(result: Any) -> np.ndarray:
    return np.asarray(result.w if isinstance(result, Net) else result)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_step_is_optimized_and_looked_at(name: str) -> None:
    fun, args, kwargs = KINDS[name]
    optimized = remat_opt.optimize(fun)
    np.testing.assert_allclose(numbers(optimized(*map(copy, args), **kwargs)), step(W, X), rtol=1e-5, atol=1e-7)
    assert not optimized.plan(*args, **kwargs).is_plain
    assert "Recomputed" in str(optimized.explain(*args, **kwargs))
    assert "differentiated=True" in str(optimized.jaxpr(*args, **kwargs))
    figures = optimized.lower(*args, **kwargs).compile()
    figures = getattr(figures, "compiled", figures)  # flax's and equinox's own objects hold JAX's
    assert figures.memory_analysis().temp_size_in_bytes < plain_temp_bytes()


class PlainTrainer:
    """Neither a tree of arrays nor a module, and not said to be static."""

    @remat_opt.optimize
    def train(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    @remat_opt.optimize
    @jax.jit
    def jitted(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)

    @remat_opt.optimize
    @nnx.jit
    def of_nnx(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x)


@pytest.mark.parametrize("ask", ["call", "lower", "plan", "explain", "jaxpr", "eval_shape", "measure", "frontier"])
@pytest.mark.parametrize("name", ["train", "jitted", "of_nnx"])
def test_a_plain_object_is_refused_with_what_to_write(name: str, ask: str) -> None:
    method = getattr(PlainTrainer(), name)
    asked = {"call": method, "measure": functools.partial(remat_opt.measure, method)}
    asked["frontier"] = functools.partial(remat_opt.frontier, method)
    said = "got PlainTrainer for self. Give what the step changes as arguments.*write static_argnums=0"
    with pytest.raises(TypeError, match=said):
        (asked.get(ask) or getattr(method, ask))(W, X)


def test_of_other_arguments_that_jax_refuses_it_says_itself() -> None:
    with pytest.raises(TypeError, match=r"arguments of step, got PlainTrainer for x.*write static_argnums=1"):
        remat_opt.optimize(step)(W, [PlainTrainer()])
    with pytest.raises(TypeError, match="Error interpreting argument"):
        remat_opt.optimize(step)(W, "text")


MEASURED = (
    *("static", "nnx.jit", "leaves that are no arrays", "plain with such leaves", "self is a pytree", "plain method"),
    *("method of an eqx.Module", "optimized method", "partial of jax.jit", "partial of an optimized one"),
)


@pytest.mark.parametrize("name", MEASURED)
def test_every_kind_of_step_is_measured_and_has_a_frontier(name: str) -> None:
    fun, args, kwargs = KINDS[name]
    found = remat_opt.measure(fun, *args, **kwargs)
    assert found.optimized is not None
    assert found.optimized.temp_bytes < plain_temp_bytes()
    assert found.plain is not None
    assert found.plain.temp_bytes == plain_temp_bytes()
    front = remat_opt.frontier(fun, *args, **kwargs)
    assert front[0].peak_bytes < front[-1].peak_bytes


@functools.cache
def plain_temp_bytes() -> int:
    return jax.jit(step).lower(W, X).compile().memory_analysis().temp_size_in_bytes


def copy(value: Any) -> Any:
    return value + 0 if isinstance(value, jax.Array) else value


def test_positions_count_without_what_is_bound() -> None:
    w, x = W + 0, X + 0
    remat_opt.optimize(trainer.static, donate_argnums=0)(w, x)
    assert w.is_deleted()
    assert not x.is_deleted()
    w = W + 0
    remat_opt.optimize(trainer.named)(w, X, kind="train")
    assert w.is_deleted()  # as the class says, which counts self
    w = W + 0
    remat_opt.optimize(functools.partial(jax.jit(static_step, static_argnums=0), "train"), donate_argnames="w")(w, X)
    assert w.is_deleted()
    w = W + 0
    remat_opt.optimize(trainer.static, donate_argnames="w")(w, X)
    assert w.is_deleted()
    model, w = Model(W + 0), W + 0
    remat_opt.optimize(functools.partial(jax.jit(lambda model, w, x: step(w, x)), model), donate_argnums=0)(w, X)
    assert w.is_deleted()
    assert not model.w.is_deleted()


def test_a_method_is_planned_once_for_all_objects_of_equal_static_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    decide = remat_opt.planner.step.decide
    monkeypatch.setattr(remat_opt.planner.step, "decide", lambda *args: plans.append(args) or decide(*args))

    class Optimized(eqx.Module):
        w: jax.Array

        @remat_opt.optimize
        def step(self, x: jax.Array) -> jax.Array:
            return step(self.w, x)

    for scale in (1.0, 2.0):
        np.testing.assert_allclose(Optimized(scale * W).step(X), step(scale * W, X), rtol=1e-5, atol=1e-7)
    assert len(plans) == 1


# Functions that others differentiate


LOSSES = {
    "plain": Kind(loss),
    "jax.jit": Kind(jax.jit(loss)),
    "static": Kind(jax.jit(lambda kind, w, x: loss(w, x), static_argnums=0), ("train", W, X)),
    "nnx.jit": Kind(nnx.jit(loss)),
    "eqx.filter_jit": Kind(eqx.filter_jit(loss)),
    "leaves that are no arrays": Kind(eqx.filter_jit(net_loss), (net, X)),
    "plain with such leaves": Kind(net_loss, (net, X)),
    "partial of jax.jit": Kind(functools.partial(jax.jit(loss), x=X), (W,)),
    "partial of eqx.filter_jit": Kind(functools.partial(eqx.filter_jit(lambda x, net: net_loss(net, x)), X), (net,)),
    "an optimized one": Kind(remat_opt.optimize(loss)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_kind_of_loss_is_checkpointed_and_finds_its_names(name: str) -> None:
    fun, args, kwargs = LOSSES[name]
    recomputing = remat_opt.checkpoint(fun)
    at = next(at for at, value in enumerate(args) if value is W or value is net)

    def of_weights(w: jax.Array, *, within: Callable) -> jax.Array:
        value = Net(w, jnp.sin) if args[at] is net else w
        return within(*args[:at], value, *args[at + 1 :], **kwargs)

    gradient = jax.grad(functools.partial(of_weights, within=recomputing))
    np.testing.assert_allclose(gradient(W), jax.grad(loss)(W, X), rtol=1e-5, atol=1e-7)
    assert "prevent_cse=True" in str(jax.make_jaxpr(gradient)(W))
    assert not recomputing.plan(*args, **kwargs).is_plain
    assert "Recomputed" in str(recomputing.explain(*args, **kwargs))
    assert remat_opt.policy(fun, *args, budget=1.0, **kwargs).names == ("layer",)


# Bad input


@pytest.mark.parametrize("name", ["optimize", "frontier", "measure", "checkpoint", "policy"])
def test_what_is_no_function_is_refused_alike(name: str) -> None:
    public = getattr(remat_opt, name)
    lowered = jax.jit(step).lower(W, X)
    for wrong in (3, None, "step", (W, 1.0), [step], lowered, lowered.compile(), jax.jit(step).trace(W, X)):
        with pytest.raises(
            TypeError, match=rf"expected a function .*got .*; write remat_opt\.{name}\(fun, …\)"
        ) as error:
            public(wrong)
        assert type(wrong).__name__ in str(error.value)
        assert len(str(error.value)) < 1000  # not all arrays of a result


def test_options_that_equinox_has_its_own_for_are_given_to_it() -> None:
    for fun in (eqx.filter_jit(net_step), net_step):
        with pytest.raises(
            ValueError, match=r'expected donate_argnums .*write .*eqx\.filter_jit\(step, donate="all"\)'
        ):
            remat_opt.optimize(fun, donate_argnums=0)(net, X)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"budgt": "2GB"}, "write 'budget', say"),
        ({"donate_argnum": 0}, "write 'donate_argnums', say"),
        ({"target": "H200"}, r"did you mean 'h200'\?"),
        ({"plan": "plan.json"}, r"write plan=remat_opt\.Plan\.load\('plan\.json'\)"),
    ],
)
def test_what_is_nearly_right_is_told_what_to_write(options: dict[str, Any], meant: str) -> None:
    with pytest.raises((TypeError, ValueError), match=meant):
        remat_opt.optimize(lambda x: x, **options)
