"""Which kernels a GPU's compiler makes one of, and what they then write over."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.gpu_siblings import Reduced, beside_reductions, join_siblings
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat

RATES = Rates(bandwidth=4.8e12, flops={"float32": 1e14})


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loops(*reads: tuple[int, ...]) -> Graph:
    """Elementwise kernels of one size that read values of that size: 0 and 1 are given, each then makes the next."""
    ops = tuple(Op(values, (2 + at,), kind=Kind.ELEMENTWISE) for at, values in enumerate(reads))
    return Graph((100,) * (2 + len(ops)), ops, inputs=(0, 1), outputs=(1 + len(ops),), fused=True)


@pytest.mark.parametrize(
    ("reads", "kernels"),
    [
        (((0,), (0, 1), (2, 3)), [(2, 3), (4,)]),
        (((0,), (1,), (2, 3)), [(2,), (3,), (4,)]),  # they read nothing together
        (((0,), (0, 2), (2, 3)), [(2,), (3,), (4,)]),  # the second reads the first
        (((0,), (2,), (0, 3)), [(2,), (3,), (4,)]),  # it does so by way of another
        (((0,), (1,), (0, 3), (2, 4)), [(3,), (2, 4), (5,)]),  # the one kernel waits for all that both read
    ],
)
def test_loops_that_read_the_same_are_one_kernel(
    reads: tuple[tuple[int, ...], ...], kernels: list[tuple[int, ...]]
) -> None:
    assert [op.outputs for op in join_siblings(loops(*reads)).ops] == kernels


def test_loops_over_a_number_or_a_larger_array_stay_apart() -> None:
    for size in (4, 200):
        graph = loops((0,), (0, 1), (2, 3))
        graph = Graph((size, *graph.sizes[1:]), graph.ops, inputs=(0, 1), outputs=(4,), fused=True)
        assert len(join_siblings(graph).ops) == 3


def test_one_kernel_of_two_makes_all_behind_either_wait_for_both() -> None:
    """What reads the first loop depends on the sixth, by way of two pairs, and must not be one with what that reads."""
    reads = ((2,), (3, 0), (0,), (1,), (2, 6), (1, 5), (4, 7, 8))
    ops = tuple(Op(values, (3 + at,), kind=Kind.ELEMENTWISE) for at, values in enumerate(reads))
    graph = Graph((100,) * 10, ops, inputs=(0, 1, 2), outputs=(9,), fused=True)
    assert [op.outputs for op in join_siblings(graph).ops] == [(5,), (6, 8), (3, 7), (4,), (9,)]


LOOP = 100  # bytes and elements of each array below


def not_written_over(*reductions: tuple[tuple[int, ...], Reduced]) -> tuple[int, ...]:
    """Which of its operands, the given values 0 and 1, a loop does not write over, beside reductions that read some
    values; the loop makes value 2, the reductions make the values from 3 on."""
    made = tuple(range(3, 3 + len(reductions)))
    loop = Op((0, 1), (2,), kind=Kind.ELEMENTWISE, name="add")
    others = tuple(
        Op(reads, (value,), kind=Kind.REDUCTION, name="reduce_sum")
        for value, (reads, _) in zip(made, reductions, strict=True)
    )
    sizes = (LOOP, LOOP, LOOP, *(4 for _ in made))
    graph = Graph(sizes, (loop, *others), inputs=(0, 1), outputs=(2, *made), fused=True)
    reduced = {value: of for value, (_, of) in zip(made, reductions, strict=True)}
    return beside_reductions(graph, sizes, reduced).ops[0].rows_of


ROWS_OF_0, COLUMNS_OF_0, COLUMNS_OF_1 = Reduced(0, LOOP, False), Reduced(0, LOOP, True), Reduced(1, LOOP, True)
OF_RESULT = Reduced(2, LOOP, True)


@pytest.mark.parametrize(
    ("reductions", "kept"),
    [
        ([((0,), ROWS_OF_0)], (0,)),
        ([((0, 1), COLUMNS_OF_0)], (0, 1)),  # of something made of both
        ([((2,), OF_RESULT)], ()),  # which goes by way of the result
        ([((0, 1), OF_RESULT)], ()),  # the same, computed again
        ([((0,), Reduced(0, LOOP // 2, True))], ()),  # over another shape
        ([((0, 2), ROWS_OF_0)], ()),  # depends on the loop, and is not of its result
        ([((0,), Reduced(None, LOOP, True))], (0,)),  # of what is read behind a barrier
        ([((0,), ROWS_OF_0), ((1,), COLUMNS_OF_1)], (0,)),  # no kernel reduces rows and columns
        ([((0,), COLUMNS_OF_0), ((1,), COLUMNS_OF_1)], (0, 1)),
        ([((2,), OF_RESULT), ((0,), COLUMNS_OF_0), ((1,), COLUMNS_OF_1)], (0,)),  # two at most, its own first
        ([((0,), COLUMNS_OF_0), ((1,), COLUMNS_OF_1), ((2,), OF_RESULT)], (0,)),
    ],
)
def test_a_loop_writes_over_nothing_that_a_reduction_in_its_kernel_reads(
    reductions: list[tuple[tuple[int, ...], Reduced]], kept: tuple[int, ...]
) -> None:
    assert not_written_over(*reductions) == kept


def normalised(x: jax.Array, weight: jax.Array, bias: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    y = x @ weight + bias
    mean = y.mean(-1, keepdims=True)
    variance = jnp.square(y).mean(-1, keepdims=True) - jnp.square(mean)
    y = jax.nn.relu((y - mean) * (lax.rsqrt(variance + 1e-6) * scale) + shift)
    return jnp.square(y.max(1)).sum()


@pytest.mark.parametrize("wanted", [(1, 2, 3, 4), (1, 3, 4), (4, 3, 2, 1)])
def test_a_normalisations_gradient_is_written_beside_what_its_scales_gradient_reads(wanted: tuple[int, ...]) -> None:
    """With the bias's gradient and the shift's the kernel has no room for the scale's, and writes over the product."""
    step, vector = jax.grad(normalised, wanted), array(512)
    avals = array(32, 2048, 128), array(128, 512), vector, vector, vector
    program = inline(jax.make_jaxpr(step)(*avals), with_barriers=True, keep_names=False)
    foreseen = allocated_by(compiled(program, RATES, platform="cuda"), "cuda")
    assert foreseen == pytest.approx(measure_flat(step, avals, target="h200").temp_bytes, rel=0.02)


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@pytest.mark.parametrize("order", [1, 2])
def test_places_that_are_scattered_to_twice_are_put_together(order: int) -> None:
    """Such as those of a max-pool's backward and of the derivative of that."""

    def first(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.vjp(pooled, jnp.sin(x))[1](y)[0]

    def step(x: jax.Array, y: jax.Array, direction: jax.Array) -> tuple[jax.Array, ...]:
        if order == 1:
            return (jnp.tanh(first(x, y)).sum(),)
        value, change = jax.jvp(lambda y: first(x, y), (y,), (direction,))
        return jnp.tanh(value).sum(), jnp.tanh(change).sum()

    avals = array(64, 64, 64, 32), array(64, 32, 32, 32), array(64, 32, 32, 32)
    program = inline(jax.make_jaxpr(step)(*avals), with_barriers=True, keep_names=False)
    graph = compiled(program, RATES, platform="cuda")
    assert [op.name for op in graph.ops].count("concatenate") == order - 1
    measured = measure_flat(lambda *given: list(step(*given)), avals, target="h200").temp_bytes
    assert allocated_by(graph, "cuda") == pytest.approx(measured, rel=0.05)
