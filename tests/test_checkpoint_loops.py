"""`remat_opt.checkpoint` of functions with loops, and of the bodies of loops: what is kept, and where."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checks import assert_close
from jax.ad_checkpoint import checkpoint_name

import remat_opt
from remat_opt import checkpoint
from remat_opt.planner.checkpoint_planning import steps_at_a_time
from remat_opt.targets import resolve_target

LAYERS, BATCH, WIDTH = 6, 16, 64  # a carry is a page of memory, which is the least that moves
OFFLOAD: dict[str, Any] = {"target": "h200", "offload": True}


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w) @ w.T, None


def over_layers(body: Callable, **options: Any) -> Callable:
    return lambda ws, x: jnp.mean(jax.lax.scan(body, x, ws, **options)[0] ** 2)


def recurrent(w: jax.Array, xs: jax.Array) -> jax.Array:
    """A weight that every step reads, a counter and results of each step."""

    def step(carry, x):
        count, state = carry
        state = jnp.tanh(state @ w + x) * jax.nn.sigmoid(x)
        return (count + 1, state), (state[0], count)

    (_, state), (rows, _) = jax.lax.scan(step, (0, jnp.zeros(xs.shape[1:])), xs, reverse=True)
    return (state**2).mean() + rows.sum()


def in_a_loop(ws: jax.Array, x: jax.Array) -> jax.Array:
    def rows(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) @ w, None), x, None, length=3)

    return over_layers(rows)(ws, x)


def stacked(ws: jax.Array, x: jax.Array) -> jax.Array:
    """Each step is worth dividing, and carries what its parts hand to each other."""

    def step(states, w):
        above, found = x, []
        for state in states:
            for _ in range(2):
                wide = jnp.tanh(jnp.concatenate([state + above] * 4)).reshape(4, *x.shape)
                above, _ = layer(wide.sum(0), w)
            found.append(above)
        return tuple(found), None

    return sum((state**2).mean() for state in jax.lax.scan(step, (x, 2 * x, 3 * x), ws)[0])


def with_a_branch(ws: jax.Array, x: jax.Array) -> jax.Array:
    def either(x, w):
        return jax.lax.cond(w[0, 0] > 0, lambda: layer(x, w)[0], lambda: jnp.cos(x)), None

    return over_layers(either)(ws, x)


def with_a_print(ws: jax.Array, x: jax.Array) -> jax.Array:
    def says(x, w):
        jax.debug.callback(lambda _: None, x[0, 0])
        return layer(x, w)

    return over_layers(says)(ws, x)


FUNCTIONS = {
    "layers": over_layers(layer),
    "layers written out in pairs": over_layers(layer, unroll=2),
    "recurrent": lambda ws, x: recurrent(ws[0], jnp.stack([x, 2 * x, x])),
    "stacked": stacked,
    "a loop in a loop": in_a_loop,
    "a branch": with_a_branch,
    "a print": with_a_print,
    "a layer, not a loss": lambda ws, x: jax.lax.scan(layer, x, ws)[0],
}
TRANSFORMS: dict[str, Callable] = {
    "jit of grad": lambda fun: jax.jit(jax.grad(fun, argnums=(0, 1))),
    "grad": lambda fun: jax.grad(fun, argnums=(0, 1)),
    "jvp": lambda fun: lambda ws, x: jax.jvp(fun, (ws, x), (ws, x)),
    "grad of vmap": lambda fun: jax.grad(lambda ws, x: jax.vmap(fun, (None, 0))(ws, jnp.stack([x, -x])).sum()),
    "jvp of grad": lambda fun: lambda ws, x: jax.jvp(jax.grad(fun), (ws, x), (ws, x)),
}


def data() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)), jax.random.normal(keys[1], (BATCH, WIDTH))


def kept(fun: Callable) -> int:
    """Bytes that JAX keeps between the passes."""
    return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(fun, *data())[1]))


@pytest.mark.short
@pytest.mark.parametrize("options", [{}, OFFLOAD], ids=["on the device", "on the host"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, options: dict[str, Any]) -> None:
    fun = FUNCTIONS[name]
    total = lambda ws, x: fun(ws, x).sum()  # noqa: E731
    ours = lambda ws, x: checkpoint(fun, **options)(ws, x).sum()  # noqa: E731
    assert_close(TRANSFORMS["jit of grad"](ours)(*data()), TRANSFORMS["jit of grad"](total)(*data()))


@pytest.mark.short
@pytest.mark.parametrize("options", [{}, OFFLOAD], ids=["on the device", "on the host"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, options: dict[str, Any]) -> None:
    apply = TRANSFORMS[transform]
    loss = over_layers(layer)
    for ours in (checkpoint(loss, **options), over_layers(checkpoint(layer, **options))):
        assert_close(apply(ours)(*data()), apply(loss)(*data()), 1e-5)


@pytest.mark.short
@pytest.mark.parametrize(
    "name", ["layers", "recurrent", "stacked", "a loop in a loop", "a branch", "a layer, not a loss"]
)
def test_no_more_is_kept_than_each_step_starts_from(name: str) -> None:
    fun = FUNCTIONS[name]
    scan = jax.lax.scan

    def by_hand(ws, x):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "scan", lambda body, *args, **options: scan(jax.checkpoint(body), *args, **options))
            return fun(ws, x)

    assert kept(checkpoint(fun)) <= kept(by_hand) < kept(fun)


def test_a_budget_recomputes_no_more_than_it_has_to() -> None:
    notes = [checkpoint(over_layers(layer), budget=budget, **OFFLOAD).plan(*data()).note for budget in (1.0, 0.5, 0.1)]
    assert [("each step of its loops is recomputed" in note, "host" in note) for note in notes] == [
        (False, False),
        (True, False),
        (True, True),
    ]


# Chunks of steps


def rollout(length: int, reverse: bool = False) -> Callable:
    """A state that is larger than what a step reads, with results and a counter of each step."""

    def step(carry, x):
        state, count = carry
        state = jnp.sin(state) + 0.1 * x
        return (state, count + 1), (state[0, 0], count)

    def loss(rates: jax.Array, state: jax.Array) -> jax.Array:
        (state, _), (firsts, counts) = jax.lax.scan(step, (state, 0), rates[:length], reverse=reverse)
        return (state**2).mean() + (firsts * counts).sum()

    return loss


def rollout_data(length: int) -> tuple[jax.Array, jax.Array]:
    return jnp.linspace(0, 1, length), data()[1]


@pytest.mark.short
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 61, 64])  # of 61 steps some are left
def test_values_of_chunks(length: int, reverse: bool) -> None:
    loss, args = rollout(length, reverse), rollout_data(length)
    assert_close(checkpoint(loss)(*args), loss(*args))
    for target in ("cpu", "h200"):
        ours = checkpoint(loss, target=target)
        assert length < 3 or "some of them at a time" in ours.plan(*args).note
        for transform in (TRANSFORMS["jit of grad"], TRANSFORMS["jvp of grad"]):
            assert_close(transform(ours)(*args), transform(loss)(*args))


@pytest.mark.short
def test_chunks_hand_on_random_keys() -> None:
    def step(carry, _):
        state, key = carry
        key, used = jax.random.split(key)
        return (jnp.sin(state) * (1 + jax.random.bernoulli(used, 0.9, state.shape)), key), used

    def loss(state: jax.Array) -> jax.Array:
        (state, _), keys = jax.lax.scan(step, (state, jax.random.key(0)), None, length=48)
        return (state**2).mean() * jax.random.uniform(keys[0])

    ours, state = checkpoint(loss), data()[1]
    assert "some of them at a time" in ours.plan(state).note
    assert_close(jax.jit(jax.grad(ours))(state), jax.jit(jax.grad(loss))(state))


@pytest.mark.short
def test_what_is_kept_grows_like_the_root_of_a_loops_length() -> None:
    def kept_bytes(fun: Callable, length: int) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(fun, *rollout_data(length))[1]))

    ours = {length: kept_bytes(checkpoint(rollout(length)), length) for length in (100, 400)}
    assert ours[100] <= 0.2 * kept_bytes(rollout(100), 100)
    assert ours[400] <= 2.1 * ours[100]
    plan = checkpoint(rollout(400)).plan(*rollout_data(400))
    assert "some of them at a time" in plan.note
    assert 0 < plan.predicted.extra_flops <= 0.5 * plan.predicted.flops
    assert checkpoint(rollout(400), plan=plan).plan(*rollout_data(400)).note == plan.note


def test_a_gpu_trains_a_long_recurrence_in_a_fraction_of_what_its_steps_start_from() -> None:
    def step(weight, state, x):
        return jnp.tanh(state @ weight) * jax.nn.sigmoid(state + x), None

    def loss_of(step: Callable, weight: jax.Array, xs: jax.Array) -> jax.Array:
        return (jax.lax.scan(partial(step, weight), jnp.zeros((512, 128)), xs)[0] ** 2).mean()

    args = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((400, 128), jnp.float32)

    def temp_bytes(loss: Callable) -> int:
        return remat_opt.measure(jax.jit(jax.grad(loss)), *args, target="h200").plain.temp_bytes

    by_hand, ours = partial(loss_of, jax.checkpoint(step)), checkpoint(partial(loss_of, step), target="h200")
    assert temp_bytes(ours) < 0.25 * temp_bytes(by_hand)


@pytest.mark.parametrize(
    ("length", "carried", "kept", "steps"),
    [(100, 1, 1, 10), (100, 4, 1, 20), (12, 1, 30, 1), (1000, 1, 6, 10), (1, 1, 1, 1), (0, 1, 1, 1), (101, 1, 1, 8)],
)
def test_how_many_steps_are_recomputed_at_a_time(length: int, carried: int, kept: int, steps: int) -> None:
    assert steps_at_a_time(length, carried, kept) == steps


def test_a_plan_of_loops_is_obeyed() -> None:
    loss = over_layers(layer)
    plan = checkpoint(loss, budget=0.5).plan(*data())
    assert checkpoint(loss, plan=plan).plan(*data()).note == plan.note
    assert kept(checkpoint(loss, plan=plan)) == kept(checkpoint(loss, budget=0.5)) < kept(loss)
    with pytest.raises(remat_opt.PlanError):
        checkpoint(over_layers(layer), plan=plan).plan(data()[0][1:], data()[1])


def test_a_users_checkpoint_in_a_loop_stays_where_it_is_asked_for() -> None:
    def named(x, w):
        return x + checkpoint_name(jnp.tanh(x @ w), "inner") @ w.T, None

    loss = over_layers(jax.checkpoint(named, policy=jax.checkpoint_policies.save_only_these_names("inner")))
    assert kept(checkpoint(loss, keep_user_names=True)) == kept(loss) > kept(checkpoint(loss))


def twelve_layers(wrap_loss: Callable, wrap_layer: Callable) -> tuple[Callable, tuple[Any, Any]]:
    loss = wrap_loss(over_layers(wrap_layer(layer)))

    def step(ws, x):
        return ws - 0.1 * jax.grad(loss)(ws, x)

    shapes = (12, 2048, 2048), (4096, 2048)
    return jax.jit(step, donate_argnums=0), tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


@pytest.mark.parametrize("place", ["the loss", "the layer"])
def test_an_absent_gpu_keeps_carries_on_the_host(place: str) -> None:
    ours, as_it_is = (lambda fun: checkpoint(fun, **OFFLOAD)), (lambda fun: fun)
    step, args = twelve_layers(*((ours, as_it_is) if place == "the loss" else (as_it_is, ours)))
    given = remat_opt.measure(step, *args, target="h200").plain
    # 369 MB with jax 0.10, 419 with 0.12; 1,896 as given, 772 with jax.checkpoint round the layer.
    assert given.temp_bytes <= 420e6
    assert given.host_temp_bytes == 12 * 4096 * 2048 * 4


def test_what_cannot_move_is_said() -> None:
    loss = over_layers(layer)
    with pytest.warns(remat_opt.RematWarning, match="nothing goes to the host"):
        on_cpu = checkpoint(loss, target="cpu", offload=True).plan(*data())
    assert "host" not in on_cpu.note
    with pytest.warns(remat_opt.RematWarning, match="nothing goes to the host") as told:
        checkpoint(loss, target="cpu", offload=True)(*data())
    assert len(told) == 1
    without_loops = lambda w, x: jnp.mean(layer(x, w)[0] ** 2)  # noqa: E731
    with pytest.warns(remat_opt.RematWarning, match="there is no loop in it"):
        alone = checkpoint(without_loops, **OFFLOAD).plan(data()[0][0], data()[1])
    assert alone.schedule == checkpoint(without_loops, target="h200").plan(data()[0][0], data()[1]).schedule
    with pytest.raises(ValueError, match="host_bandwidth"):
        checkpoint(loss, target="v5e", offload=True)
    with pytest.raises(ValueError, match=r"a policy or offload=…"):
        checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable, offload=True)
    v5e = dataclasses.replace(resolve_target("v5e"), host_bandwidth=10e9)
    assert "host" in checkpoint(loss, target=v5e, offload=True).plan(*data()).note
