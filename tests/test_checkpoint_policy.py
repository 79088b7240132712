"""`policy=`, `prevent_cse=` and `concrete=` of `remat_opt.checkpoint`: what `jax.checkpoint` makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checks import assert_close, checkpoints_in
from jax.ad_checkpoint import checkpoint_name
from test_checkpoint_transforms import data, loss

import remat_opt

checkpoint = remat_opt.checkpoint
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "own": lambda primitive, *_, **__: primitive.name == "tanh",
}


def named_loss(params: Any, x: jax.Array, kind: str, *, power: int = 2) -> jax.Array:
    for layer in params:
        x = checkpoint_name(jnp.tanh(x @ layer["w"]), "hidden")
    return (x**power).sum() if kind == "loss" else x.sum()


@pytest.mark.short
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_obeyed_as_by_jax(name: str) -> None:
    params, x = data()
    ours = checkpoint(named_loss, policy=POLICIES[name], static_argnums=2, static_argnames="power")
    theirs = jax.checkpoint(named_loss, policy=POLICIES[name], static_argnums=(2,))
    gradients = (jax.make_jaxpr(jax.grad(f), static_argnums=2)(params, x, "loss") for f in (ours, theirs))
    assert len(set(map(without_addresses, gradients))) == 1
    cubed = jax.grad(lambda params: ours(params, x, "loss", power=3))(params)
    assert_close(cubed, jax.grad(lambda params: named_loss(params, x, "loss", power=3))(params))


def without_addresses(jaxpr: Any) -> str:
    return " ".join(word for word in str(jaxpr).split() if "0x" not in word)


def test_an_option_of_the_search_beside_a_policy_is_refused_with_what_to_write() -> None:
    plan = checkpoint(loss).plan(*data())
    options: list[dict[str, Any]] = [{"budget": 0.5}, {"solver": "hong"}, {"target": "h200"}, {"plan": plan}]
    for option in options:
        (name,) = option
        with pytest.raises(ValueError, match=rf"a policy or {name}=….*policy=… alone"):
            checkpoint(loss, policy=POLICIES["dots"], **option)
    with pytest.raises(TypeError, match=r"policy=jax\.checkpoint_policies\.dots_saveable"):
        checkpoint(loss, policy="dots_saveable")  # pyright: ignore[reportArgumentType]
    names = remat_opt.policy(named_loss, *data(), "loss", static_argnums=2)
    with pytest.raises(TypeError, match=r"found\.policy"):
        checkpoint(loss, policy=names)  # pyright: ignore[reportArgumentType]


def test_there_is_no_plan_of_a_policy() -> None:
    recomputing = checkpoint(loss, policy=POLICIES["dots"])
    for ask in (recomputing.plan, recomputing.explain):
        with pytest.raises(ValueError, match=r"print_saved_residuals.*without a policy for a plan"):
            ask(*data())


def test_concrete_and_prevent_cse_as_in_jax() -> None:
    with pytest.raises(NotImplementedError, match="static_argnums"):
        checkpoint(loss, concrete=True)
    with pytest.raises(TypeError, match="prevent_cse to be a bool, or a sequence"):
        checkpoint(loss, prevent_cse=1)  # pyright: ignore[reportArgumentType]
    assert_close(checkpoint(loss, concrete=False)(*data()), loss(*data()))


def barriers(prevent_cse: Any) -> list[str]:
    """The lines of a lowered gradient that hold a barrier."""
    gradient = jax.jit(jax.grad(checkpoint(loss, prevent_cse=prevent_cse), argnums=(0, 1)))
    return [line for line in gradient.lower(*data()).as_text().splitlines() if "optimization_barrier" in line]


@pytest.mark.short
def test_without_a_policy_prevent_cse_says_what_stands_behind_barriers() -> None:
    assert checkpoints_in(checkpoint(loss), *data()) >= 2
    assert barriers(False) == []
    assert barriers(True) == barriers((True, True))
    assert 0 < operands((False, True)) < operands(True)
    assert operands((False, False)) < operands((False, True))


def operands(prevent_cse: Any) -> int:
    return sum(line.split(" : ")[0].split("optimization_barrier")[1].count("%") for line in barriers(prevent_cse))


@pytest.mark.parametrize("layer", ["elementwise", "elementwise tail"])
def test_a_scan_over_layers_keeps_what_jax_keeps(layer: str) -> None:
    def body(x, w):
        y = x @ w if layer != "elementwise" else jnp.tanh(x) * w[0]
        return jax.nn.gelu(y), None

    def residuals(wrap):
        def fun(ws, x):
            return jax.lax.scan(wrap(body), x, ws)[0].sum()

        _, pullback = jax.vjp(fun, jnp.ones((5, 8, 8)), jnp.ones((4, 8)))
        return sum(x.nbytes for x in jax.tree.leaves(pullback))

    assert residuals(checkpoint) <= residuals(jax.checkpoint) < residuals(lambda fun: fun)
