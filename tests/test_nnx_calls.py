"""Steps of nnx modules: each of flax's modes updates what it updates without us, and a failed call changes nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close
from flax import nnx
from flax.errors import TraceContextError

import remat_opt

X = jnp.asarray(np.random.default_rng(0).normal(size=(128, 16)), jnp.float32)


class Net(nnx.Module):
    """With a counter; a call is a training step."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
        self.count = nnx.Variable(jnp.zeros(()))

    def forward(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.sin(layer(x))
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        return step(self, x)

    @nnx.jit
    def train_step(self, x: jax.Array) -> jax.Array:
        return step(self, x)


def step(model: Net, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model.forward(x) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    model.count[...] += 1
    return loss


def returning_step(model: Net, x: jax.Array) -> tuple[Net, jax.Array]:
    loss = step(model, x)
    return model, loss


def merging_step(graph: Any, state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    model = nnx.merge(graph, state)
    loss = step(model, x)
    return nnx.state(model), loss


def contents(model: Net) -> dict[str, Any]:
    """The identity of every module, variable and array; flax makes the mappings between them anew with each update."""
    kinds = (nnx.Module, nnx.List, nnx.Variable)
    nodes = {str(path): id(node) for path, node in nnx.iter_graph(model) if isinstance(node, kinds)}
    arrays = {str(path): id(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    return {"nodes": nodes, "arrays": arrays, "attributes": sorted(vars(model)), "graph": nnx.graphdef(model)}


Case = Callable[[Net, Callable[[Any], Any]], Callable[[], Any]]
"""Makes a call of a step of a model, with the step as it is or optimised."""

# The functions that flax lifts, or that we lift as it would, and one under jax.jit, which is pure.
CASES: dict[str, Case] = {
    "nnx.jit": lambda model, ours: functools.partial(ours(nnx.jit(step)), model, X),
    "returns": lambda model, ours: functools.partial(ours(nnx.jit(returning_step)), model, X),
    "no graph updates": lambda model, ours: functools.partial(ours(nnx.jit(step, graph_updates=False)), model, X),
    "tree": lambda model, ours: functools.partial(ours(nnx.jit(step, graph=False)), model, X),
    "donated tree": lambda model, ours: functools.partial(ours(nnx.jit(step, graph=False, donate_argnums=0)), model, X),
    "jit_partial": lambda model, ours: functools.partial(ours(nnx.jit_partial(step, model, graph=False)), X),
    "jit_partial of graphs": lambda model, ours: functools.partial(
        ours(nnx.jit_partial(step, model, graph=True, graph_updates=False)), X
    ),
    "cached_partial": lambda model, ours: functools.partial(nnx.cached_partial(ours(nnx.jit(step)), model), X),
    "method": lambda model, ours: functools.partial(ours(model.train_step), X),
    "partial": lambda model, ours: functools.partial(ours(functools.partial(nnx.jit(step), model)), X),
    "jax.jit": lambda model, ours: functools.partial(ours(jax.jit(returning_step)), model, X),
    "merge": lambda model, ours: lambda: ours(jax.jit(merging_step, static_argnums=0))(*nnx.split(model), X),
}
PURE = {"jax.jit", "merge"}


def observe(case: str, ours: Callable[[Any], Any], model: Net) -> dict[str, Any]:
    old, kernel, nodes = model.layers[0].kernel[...] + 0, model.layers[0].kernel, contents(model)["nodes"]
    result = CASES[case](model, ours)()
    returned = result[0] if isinstance(result, tuple) else None
    return {
        "loss": np.asarray(result[1] if isinstance(result, tuple) else result).tobytes(),
        "state": [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(model))],
        "result": [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(returned)],
        "is the model": returned is model,
        "variables stay": model.layers[0].kernel is kernel and contents(model)["nodes"] == nodes,
        "changed": bool(jnp.any(model.layers[0].kernel[...] != old)),
    }


@pytest.mark.short
@pytest.mark.parametrize("case", CASES)
def test_each_mode_updates_what_it_updates_without_us(case: str) -> None:
    model = Net()
    found, expected = observe(case, remat_opt.optimize, model), observe(case, lambda fun: fun, Net())
    assert found == expected
    assert found["changed"] == (case not in PURE)
    jax.tree.map(lambda leaf: leaf + 1, nnx.state(model))  # nothing of a trace is left in it


@pytest.mark.parametrize("of", ["method", "partial", "keyword", "module"])
def test_modules_that_are_bound_to_a_plain_function_are_updated(of: str) -> None:
    ours, plain = Net(), Net()
    bound = {
        "method": ours.__call__,
        "partial": functools.partial(step, ours),
        "keyword": functools.partial(lambda x, *, model: step(model, x), model=ours),
        "module": ours,
    }[of]
    optimized = remat_opt.optimize(bound, donate_argnums=0)
    with pytest.warns(UserWarning, match=r"donated buffers were not usable: float32\[128,16\]"):
        loss = optimized(X + 0)  # positions count as for the bound function
    np.testing.assert_array_equal(loss, nnx.jit(step)(plain, X))
    for one, other in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not optimized.plan(X).is_plain


@pytest.mark.parametrize("given", [step, nnx.jit(step)], ids=["plain", "nnx.jit"])
def test_updates_come_out_of_an_outer_nnx_transform_and_of_shared_weights(given: Callable) -> None:
    def after(fun: Callable, *, shared: bool) -> Any:
        model = Net()
        if shared:
            model.layers[1].kernel = model.layers[0].kernel
        return [fun(model, X) for _ in range(2)], nnx.to_pure_dict(nnx.state(model))

    optimized = remat_opt.optimize(given)
    for shared in (False, True):
        expected = after(nnx.jit(step), shared=shared)
        assert_close(after(optimized, shared=shared), expected)
        assert_close(after(nnx.jit(lambda model, x: optimized(model, x)), shared=shared), expected)


# A failed call


class UserError(Exception):
    """What a user's function raises."""


def failing_step(model: Net, x: jax.Array) -> jax.Array:
    model.layers.append(nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    step(model, x)
    raise UserError


def other_plan() -> remat_opt.Plan:
    return remat_opt.optimize(lambda w: jax.grad(lambda w: jnp.sum(jnp.sin(X @ w @ w)))(w)).plan(jnp.ones((16, 16)))


class Failure(NamedTuple):
    """What goes wrong: options of `optimize`, what of ours raises, and the error that the user sees."""

    error: type[Exception]
    options: Callable[[], dict[str, Any]] = dict
    broken: str | None = None


FAILURES = {
    "the step": Failure(UserError),
    "the budget": Failure(remat_opt.InfeasibleBudget, lambda: {"budget": 1000, "split": False}),
    "the plan": Failure(remat_opt.PlanError, lambda: {"plan": other_plan()}),
    "planning": Failure(UserError, broken="remat_opt.planner.step.decide"),
    "compiling": Failure(UserError, lambda: {"budget": 0.5}, "remat_opt.callable.planned.compile_as_called"),
    "writing": Failure(UserError, broken="remat_opt.planner.prepared.write"),
}
KINDS: dict[str, Callable[[Callable], Any]] = {
    "plain": lambda fun: fun,
    "nnx.jit": nnx.jit,
    "tree": functools.partial(nnx.jit, graph=False),
    "jax.jit": jax.jit,
}
USES: dict[str, Callable[[Any, Net], Any]] = {
    "plan": lambda fun, model: fun.plan(model, X),
    "lower": lambda fun, model: fun.lower(model, X),
    "call": lambda fun, model: fun(model, X),
    "call in a jit": lambda fun, model: jax.jit(lambda x: fun(model, x))(X),
}


def raise_user_error(*args: Any, **kwargs: Any) -> Any:
    raise UserError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_call_changes_no_module(failure: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, options, broken = FAILURES[failure]
    options = options()
    if broken is not None:
        monkeypatch.setattr(broken, raise_user_error)
    optimized = remat_opt.optimize(KINDS[kind](failing_step if failure == "the step" else step), **options)
    for use, call in USES.items():
        if (use == "call in a jit" and failure != "the step") or (failure, use) == ("writing", "plan"):
            continue  # the module that it closes over is the failure there; what is planned is not yet written
        model = Net()
        before = contents(model)
        with pytest.raises(error):
            call(optimized, model)
        assert contents(model) == before, use
        assert np.isfinite(nnx.jit(step)(model, X)), use  # it is as good as it was


MODEL = Net()


class Trainer:
    """Not a module itself."""

    def __init__(self, model: Net) -> None:
        self.parts = {"model": model}

    def train(self, x: jax.Array) -> jax.Array:
        return step(self.parts["model"], x)

    def train_jitted(self, x: jax.Array) -> jax.Array:
        return self.parts["model"].train_step(x)


def of_a_global(x: jax.Array) -> jax.Array:
    return (lambda x: MODEL.train_step(x))(x)


@pytest.mark.parametrize("lift", [remat_opt.optimize, remat_opt.checkpoint], ids=["optimize", "checkpoint"])
@pytest.mark.parametrize("fun", ["cell", "global", "nnx.jit", "jax.jit", "trainer", "trainer of nnx.jit", "cached"])
def test_a_module_that_is_closed_over_stays_as_it_was_and_the_error_says_what_to_write(fun: str, lift: Any) -> None:
    model = Net() if fun != "global" else MODEL
    function = {
        "cell": lambda x: model.train_step(x),
        "global": of_a_global,
        "nnx.jit": nnx.jit(lambda x: model.train_step(x)),
        "jax.jit": jax.jit(lambda x: model.train_step(x)),
        "trainer": Trainer(model).train,
        "trainer of nnx.jit": Trainer(model).train_jitted,
        "cached": nnx.cached_partial(nnx.jit(step), model),
    }[fun]
    before = contents(model)
    with pytest.raises((ValueError, TraceContextError)) as failed:
        lift(function)(X)
    assert "Write step(model, …) and give the module at each call" in "".join(failed.value.__notes__)
    assert contents(model) == before
    assert np.isfinite(nnx.jit(step)(model, X))


def test_options_that_nnx_reads_arguments_by_are_given_to_it() -> None:
    with pytest.raises(
        ValueError, match=r"expected static_argnums to be given.*write remat_opt\.optimize\(nnx\.jit\(step"
    ):
        remat_opt.optimize(nnx.jit(step), static_argnums=1)
    model = Net()
    optimized = remat_opt.optimize(nnx.jit(step, graph=False), donate_argnums=0, compiler_options={})
    optimized(model, X)
    assert np.isfinite(optimized(model, X))  # donated variables were handed back
