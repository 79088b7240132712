"""What XLA's CPU compiler has to be told to wait, on graphs that can be checked by hand, and by the compiler."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from remat_opt import measure, optimize
from remat_opt.graph.barriers import Barrier
from remat_opt.graph.cpu_barriers import cpu_barriers
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.rewrites.random_masks import masks_of_bits
from remat_opt.trace.inline import inline

BIG, SMALL = 1000, 2


# Values: 0 a key, 1 a layer's input, 2 what the layer makes of it, 3 bits, 4 what is masked with them, 5 the loss.
MASKED = Graph(
    (SMALL, BIG, BIG, BIG, BIG, 0),
    (Op((1,), (2,)), Op((0,), (3,)), Op((2, 3), (4,)), Op((4,), (5,))),
    inputs=(0, 1),
    outputs=(5,),
    fused=True,
)
AGAIN = Schedule((Run((0, 1, 2)), Run((0, 1, 2), recomputed=True), Run((3,))))


# Values: 0 weights, 1 logits, 2 the weights' gradient, 3 the cotangent of a loop, 4 what the loop gives, 5 the update.
TIED = Graph(
    (BIG // 2, BIG, BIG // 2, SMALL, SMALL, 0),
    (
        Op((0,), (1,)),
        Op((1,), (2,), Kind.CONTRACTION),
        Op((1,), (3,), Kind.CONTRACTION),
        Op((3,), (4,), workspace=BIG),
        Op((2, 4), (5,)),
    ),
    inputs=(0,),
    outputs=(5,),
    fused=True,
)
BEHIND_A_BARRIER = Schedule((Run((0,)), Run((0,), recomputed=True), Run((1, 2, 3, 4))))


# Values: 0 an image, 1 factors of its features, 2 a gradient, 3 the sum of their product, 4 the loss.
SUMMED = Graph(
    (BIG, SMALL, BIG, SMALL, 0),
    (Op((0,), (1,)), Op((0,), (2,)), Op((1, 2), (3,), Kind.REDUCTION), Op((3,), (4,))),
    inputs=(0,),
    outputs=(4,),
    fused=True,
)


AFTER_A_BARRIER = Schedule((Run((0,)), Run((0,), recomputed=True), Run((1, 2, 3))))


def of_other_ops(graph: Graph, **changed: Op) -> Graph:
    """`op3=…` is the new op 3."""
    ops = [changed.get(f"op{index}", op) for index, op in enumerate(graph.ops)]
    return dataclasses.replace(graph, ops=tuple(ops))


BITS_FIRST = Schedule((Run((1, 0, 2)), Run((1, 0, 2), recomputed=True), Run((3,))))
BY_HAND = {
    "bits wait for what they are to mask": (MASKED, AGAIN, {(1, 1): Barrier((0,), (2,))}),
    "made of as much": (dataclasses.replace(MASKED, sizes=(BIG // 10, *MASKED.sizes[1:])), AGAIN, {}),
    "made first": (MASKED, BITS_FIRST, {}),
    "a loop waits for a gradient smaller than what it is made of": (
        TIED, BEHIND_A_BARRIER, {(2, 3): Barrier((3,), (2,))}
    ),
    "no smaller": (dataclasses.replace(TIED, sizes=(BIG // 2, BIG, BIG, SMALL, SMALL, 0)), BEHIND_A_BARRIER, {}),
    "no memory of its own": (of_other_ops(TIED, op3=Op((3,), (4,))), BEHIND_A_BARRIER, {}),
    "the logits are read": (of_other_ops(TIED, op3=Op((3, 1), (4,), workspace=BIG)), BEHIND_A_BARRIER, {}),
    "the gradient is read": (of_other_ops(TIED, op3=Op((3, 2), (4,), workspace=BIG)), BEHIND_A_BARRIER, {}),
    "factors of a sum wait for what they are spread over": (SUMMED, AFTER_A_BARRIER, {(2, 2): Barrier((1,), (2,))}),
    "nothing is recomputed": (SUMMED, Schedule((Run((0, 1, 2, 3)),)), {}),
    "no factors": (of_other_ops(SUMMED, op2=Op((2,), (3,), Kind.REDUCTION)), AFTER_A_BARRIER, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_what_waits(case: tuple) -> None:
    graph, schedule, expected = case
    assert cpu_barriers(graph, schedule, simulate(graph, schedule)) == expected


def with_dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0)


def test_masks_are_comparisons_of_random_bits() -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def masks_in(fun) -> list:
        program = inline(jax.make_jaxpr(fun)(key, x))
        return [program.avals[value] for value in masks_of_bits(program)]

    assert [(mask.shape, mask.dtype) for mask in masks_in(with_dropout)] == [((8, 8), jnp.dtype(bool))]
    assert masks_in(lambda key, x: jax.random.uniform(key, x.shape) * x) == []
    assert masks_in(lambda key, x: jnp.where(jax.random.uniform(key, x.shape) < x, x, 0)) == []
    assert masks_in(lambda key, x: jnp.where(x > 0.5, x, 0)) == []


LAYERS, WIDTH = 6, 256
X = jax.ShapeDtypeStruct((64, WIDTH, WIDTH), jnp.float32)


def test_dropout_costs_a_byte_a_number_on_the_cpu() -> None:
    """Under eight arrays of a layer's size; ten where bits are kept: Threefry's loop gives them as two arrays."""

    def step(weights: jax.Array, key: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            h = x
            for layer in range(LAYERS):
                h = with_dropout(jax.random.fold_in(key, layer), jnp.sin(h @ weights[layer]))
            return (h**2).sum()

        return weights - 0.1 * jax.grad(loss)(weights)

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = measure(optimize(step, target="cpu"), weights, key, X, target="cpu").optimized
    assert found is not None
    assert found.temp_bytes < 8 * 4 * X.size
