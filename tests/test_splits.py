"""Splits, stacks and what no loop reads, as compilers are given them."""

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.rewrites.captured import capture
from remat_opt.rewrites.splits import by_slices
from remat_opt.trace.inline import inline


def test_a_split_is_a_slice_for_each_piece() -> None:
    program = by_slices(inline(jax.make_jaxpr(lambda x: jnp.split(x, [1, 3], 1))(jnp.ones((4, 8)))))
    assert [equation.primitive.name for equation in program.equations] == ["slice"] * 3
    limits = [(e.params["start_indices"], e.params["limit_indices"]) for e in program.equations]
    assert limits == [((0, 0), (4, 1)), ((0, 1), (4, 3)), ((0, 3), (4, 8))]
    assert [equation.outputs[0] for equation in program.equations] == list(program.outputs)


def test_stacks_that_no_loop_reads_are_dropped() -> None:
    def step(x: jax.Array) -> jax.Array:
        def forward(x: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            return jnp.sin(x), (jnp.cos(x), jnp.exp(x))

        def backward(x: jax.Array, kept: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return jax.jit(lambda x, read, unread: x * read)(x, *kept), None

        x, kept = lax.scan(forward, x, None, length=4)
        return lax.scan(backward, x, kept, reverse=True)[0]

    program = capture(jax.jit(step), (jnp.ones((8, 16)),), {}).program
    stacks = [program.avals[v].shape for equation in program.equations for v in equation.outputs]
    assert stacks.count((4, 8, 16)) == 1
