"""Multiples that a GPU's compiler makes again, against the compiler itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.gpu_multiples import with_multiples_made_again
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.program.inline import Program, inline
from remat_opt.targets import measure_flat, reports_gaps_twice
from remat_opt.targets.devices import resolve_target

H200 = resolve_target("h200")


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def step_of(made: Callable) -> Callable:
    """A step that reads what is made of a product in a loop and behind it."""

    def step(x: jax.Array, weight: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x @ weight
        multiple = made(product)
        start = jnp.sin(scale) + jnp.zeros_like(product)
        found, _ = lax.scan(lambda carry, _: (jnp.tanh(carry * multiple) + scale, None), start, None, length=3)
        return (found + multiple * scale).sum(0), (multiple * scale * scale).sum(1)

    return step


@pytest.mark.parametrize("made", [lambda x: 2.0 * x, jnp.tanh, lambda x: x], ids=["twice", "its tangent", "itself"])
def test_of_a_multiple_that_a_loop_is_given_the_array_waits_too(made: Callable) -> None:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 256), (256, 2048), (8192, 1))]
    graph = compiled(program_of(step_of(made), *avals), Rates(H200.bandwidth, H200.flops), platform=H200.platform)
    foreseen = allocated_by(graph, H200.platform, gaps_twice=reports_gaps_twice(H200.platform))
    figures = measure_flat(lambda *arrays: list(step_of(made)(*arrays)), avals, target="h200")
    assert foreseen == pytest.approx(figures.temp_bytes, rel=0.01)


def looped(multiple: jax.Array, start: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (jnp.tanh(carry * multiple), None), start, None, length=3)[0]


@pytest.mark.parametrize(
    ("function", "is_changed"),
    [
        (lambda x, y: (looped(2.0 * x, y), 2.0 * x * y), True),
        (lambda x, y: (looped(2.0 * x, y), 2.0 * x + y), False),
        (lambda x, y: (looped(x * y, y), x * y * y), False),
        (lambda x, y: (looped(x, y), 2.0 * x * y), False),
        (lambda x, y: (looped(x - 2.0, y), (x - 2.0) * y), False),
    ],
)
def test_products_read_what_a_multiple_is_of(function: Callable, is_changed: bool) -> None:
    program = program_of(function, *[jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2)
    found = with_multiples_made_again(program)
    read = [(one.inputs, other.inputs) for one, other in zip(program.equations, found.equations, strict=True)]
    changed = [(set(before) - set(after), set(after) - set(before)) for before, after in read if before != after]
    assert len(changed) == is_changed
    for multiple, array in changed:
        assert array == {0}
        assert multiple.isdisjoint(program.inputs)
