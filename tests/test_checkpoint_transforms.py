"""Every transform of JAX on `remat_opt.checkpoint(fun)` gives what it gives on `fun`, as `jax.checkpoint` does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, checkpoints_in
from jax.sharding import Mesh, PartitionSpec

import remat_opt
from remat_opt.trace import compat

pytestmark = pytest.mark.short

DEPTH, WIDTH, BATCH = 5, 8, 16


def params_of(depth: int = DEPTH) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), depth)
    return [{"w": 0.4 * jax.random.normal(key, (WIDTH, WIDTH)), "b": jnp.full(WIDTH, 0.1)} for key in keys]


def network(params: Any, x: jax.Array) -> jax.Array:
    """Products, a custom derivative (relu), reductions and elementwise work."""
    for layer in params:
        y = jax.nn.relu(x @ layer["w"] + layer["b"])
        x = x + jnp.tanh(y) * jax.nn.softmax(y)
    return x


def loss(params: Any, x: jax.Array) -> jax.Array:
    return (network(params, x) ** 2).mean()


def data() -> tuple[Any, jax.Array]:
    return params_of(), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def scanned(fun: Any, params: Any, x: jax.Array) -> jax.Array:
    def body(total, row):
        return total + fun(params, row[None]), None

    return jax.lax.scan(body, jnp.zeros(()), x)[0]


TRANSFORMS = {
    "call": lambda fun: fun,
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "grad by both": partial(jax.grad, argnums=(0, 1)),
    "jit of grad": lambda fun: jax.jit(jax.grad(fun)),
    "grad of jit": lambda fun: jax.grad(jax.jit(fun)),
    "jvp": lambda fun: lambda p, x: jax.jvp(fun, (p, x), (p, x)),
    "vjp": lambda fun: lambda p, x: jax.vjp(fun, p, x)[1](jnp.float32(2.0)),
    "linearize": lambda fun: lambda p, x: jax.linearize(partial(fun, p), x)[1](x),
    "hessian": lambda fun: lambda p, x: jax.hessian(fun, argnums=1)(p, x[:2]),
    "grad of grad": lambda fun: jax.grad(lambda p, x: (jax.grad(fun, argnums=1)(p, x) ** 2).sum()),
    "jvp of grad": lambda fun: lambda p, x: jax.jvp(jax.grad(fun), (p, x), (p, x)),
    "vmap": lambda fun: jax.vmap(lambda p, row: fun(p, row[None]), in_axes=(None, 0)),
    "grad of vmap": lambda fun: jax.grad(lambda p, x: jax.vmap(lambda row: fun(p, row[None]))(x).sum()),
    "vmap of grad": lambda fun: jax.vmap(jax.grad(lambda p, row: fun(p, row[None])), in_axes=(None, 0)),
    "in scan": lambda fun: jax.grad(partial(scanned, fun)),
    "under jax.checkpoint": lambda fun: jax.grad(jax.checkpoint(fun)),
    "under itself": lambda fun: jax.grad(remat_opt.checkpoint(fun)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_give_the_same(transform: str) -> None:
    args = data()
    apply = TRANSFORMS[transform]
    assert_close(jax.jit(apply(remat_opt.checkpoint(loss)))(*args), jax.jit(apply(loss))(*args), 2e-5)


@pytest.mark.parametrize("transform", ["call", "value_and_grad", "vmap"])
def test_transforms_give_the_same_without_jit(transform: str) -> None:
    args = data()
    apply = TRANSFORMS[transform]
    assert_close(apply(remat_opt.checkpoint(loss))(*args), apply(loss)(*args), 2e-5)


@pytest.mark.parametrize("transform", ["call", "jit of grad", "jvp", "vmap", "in scan", "grad of grad"])
def test_a_layer_gives_the_same(transform: str) -> None:
    args = data()
    layer = remat_opt.checkpoint(network)
    apply = TRANSFORMS[transform]
    ours = jax.jit(apply(lambda p, x: (layer(p, x) ** 2).mean()))(*args)
    assert_close(ours, jax.jit(apply(loss))(*args), 2e-5)


def test_the_functions_of_these_tests_are_divided() -> None:
    assert checkpoints_in(remat_opt.checkpoint(loss), *data()) >= 2
    assert checkpoints_in(remat_opt.checkpoint(network), *data()) >= 1


def test_in_shard_map_with_a_collective_inside() -> None:
    params, x = data()
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def total(fun):
        def of_one_device(params, x):
            return jax.lax.pmean(fun(params, x), "data")

        specs = (PartitionSpec(), PartitionSpec("data"))
        return jax.shard_map(of_one_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    def loss_with_collective(params, x):
        return loss(params, x + jax.lax.pmean(x, "data"))

    for fun in (loss, loss_with_collective):
        checkpointed = total(remat_opt.checkpoint(fun))
        assert checkpoints_in(checkpointed, params, x) > 1  # divided, and not one checkpoint round what failed
        assert_close(jax.jit(jax.grad(checkpointed))(params, x), jax.jit(jax.grad(total(fun)))(params, x))


def vmapped_inside(params: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: loss(params, row[None]))(x).mean()


def with_more_results(params: Any, x: jax.Array) -> Any:
    y = network(params, x)
    return (y**2).mean(), {"sums": y.sum(0), "count": jnp.int32(len(y)), "none": None}


def loops_and_branches(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.lax.scan(lambda c, _, w=layer["w"]: (jnp.tanh(c @ w), None), x, length=3)[0]
        x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
        large = jax.lax.stop_gradient(jax.lax.while_loop(lambda s: s < 10, lambda s: s * 2, jnp.abs(x).sum() + 1))
        x = x * large / 100  # where tanh is 1, its derivative is what rounding leaves
    return (x**2).mean()


def gradients_inside(params: Any, x: jax.Array) -> jax.Array:
    return loss(params, x) + (jax.grad(loss, argnums=1)(params, x) ** 2).sum()


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x * 2.0


clipped.defvjp(lambda x: (clipped(x), x), lambda x, ct: (jnp.clip(ct, -1e-3, 1e-3) + 0 * x,))


@jax.custom_jvp
def odd(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


odd.defjvp(lambda primals, tangents: (odd(*primals), 3.0 * tangents[0]))


def custom_rules(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = x + odd(clipped(jnp.tanh(x @ layer["w"])))
    return (x**2).sum()


def complex_numbers(params: Any, x: jax.Array) -> jax.Array:
    z = 0.1 * x[:8] + 0.05j * jnp.eye(WIDTH)
    for layer in params:
        z = jnp.sin(z @ layer["w"]) * z
    return jnp.abs(z).sum()


@pytest.mark.parametrize(
    "fun", [vmapped_inside, with_more_results, loops_and_branches, gradients_inside, custom_rules, complex_numbers]
)
def test_gradients_of_other_functions_are_the_same(fun: Callable) -> None:
    args, has_aux = data(), fun is with_more_results
    ours, theirs = (jax.value_and_grad(f, has_aux=has_aux) for f in (remat_opt.checkpoint(fun), fun))
    expected = jax.jit(theirs)(*args)
    assert_close(jax.jit(ours)(*args), expected, 1e-5, 1e-5)
    if has_aux:
        assert_close(ours(*args), expected, 1e-5, 1e-5)
    assert checkpoints_in(remat_opt.checkpoint(fun), *args) >= 2


def test_bfloat16() -> None:
    params, x = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), data())
    expected = jax.jit(jax.grad(loss))(params, x)
    assert_close(jax.jit(jax.grad(remat_opt.checkpoint(loss)))(params, x), expected, 0.05, 0.05)


def test_under_vmap_with_an_axis_name() -> None:
    params, x = data()

    def fun(params, row):
        return loss(params, row[None] - jax.lax.pmean(row, "rows"))

    def mean(fun):
        return lambda p, x: jax.vmap(partial(fun, p), axis_name="rows")(x).mean()

    ours = jax.jit(jax.grad(mean(remat_opt.checkpoint(fun))))(params, x)
    assert_close(ours, jax.jit(jax.grad(mean(fun)))(params, x))


# Under jax_remat3


@pytest.fixture
def remat3():
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.filterwarnings("ignore:remat_opt. with jax_remat3")
@pytest.mark.parametrize(
    "transform", ["call", "grad", "jit of grad", "jvp", "vmap", "grad of vmap", "in scan", "linearize"]
)
def test_remat3_gives_the_same(transform: str, remat3: None) -> None:
    args = data()
    apply = TRANSFORMS[transform]
    assert_close(jax.jit(apply(remat_opt.checkpoint(loss)))(*args), jax.jit(apply(loss))(*args), 2e-5)


def test_remat3_warns_where_it_saves_little(remat3: None, recwarn: pytest.WarningsRecorder) -> None:
    from remat_opt.callable import checkpointing

    checkpointing._warn_of_remat3_once.cache_clear()
    jax.grad(remat_opt.checkpoint(loss))(*data())
    told = [one for one in recwarn if issubclass(one.category, remat_opt.RematWarning)]
    assert bool(told) == (not compat.remat3_pins_cotangents())
    if told:
        assert told[0].filename == __file__


@pytest.mark.filterwarnings("ignore:remat_opt. with jax_remat3")
def test_remat3_checkpoints_of_the_user_are_replaced_or_kept(remat3: None) -> None:
    def with_layers(wrap: Callable, params: Any, x: Any) -> Any:
        for _ in range(4):
            x = wrap(lambda x: jnp.sin(x) * x)(x)
        return loss(params, x)

    args = data()
    with_checkpoints = partial(with_layers, jax.checkpoint)
    plain = partial(with_layers, lambda fun: fun)
    replaced, kept = (remat_opt.checkpoint(with_checkpoints, keep_user_names=keep) for keep in (False, True))
    assert replaced.plan(*args).saved == remat_opt.checkpoint(plain).plan(*args).saved
    replaced_jaxpr, kept_jaxpr = (str(jax.make_jaxpr(fun)(*args)) for fun in (replaced, kept))
    assert kept_jaxpr.count("RematTraced[") > max(4, replaced_jaxpr.count("RematTraced["))  # the user's and ours
    expected = jax.jit(jax.grad(plain))(*args)
    for checkpointed in (replaced, kept):
        assert_close(jax.jit(jax.grad(checkpointed))(*args), expected, 2e-5)
