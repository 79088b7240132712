"""Products with vectors, which a GPU's compiler does by loops: the values, which those are, and what that saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import primitives

from remat_opt.compilers.gpu_vectors import LARGEST, with_vectors_by_loops
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.loops.regions import emit_of
from remat_opt.program.inline import Program, inline

RATES = Rates(bandwidth=4.8e12, flops={"float32": 5e14})


def products(program: Program) -> int:
    return sum(equation.primitive is primitives.dot_general_p for equation in program.equations)


@st.composite
def products_of_arrays(draw: st.DrawFn):
    """Shapes of two operands and the dimensions of a `dot_general` of them."""
    sizes = st.lists(st.sampled_from([1, 1, 2, 3]), max_size=2)
    batch, summed, rows, columns = (draw(sizes) for _ in range(4))
    shapes, places = [], []
    for free in (rows, columns):
        kinds = [(kind, at) for kind, count in enumerate(map(len, (batch, summed, free))) for at in range(count)]
        order = draw(st.permutations(kinds))
        shapes.append(tuple((batch, summed, free)[kind][at] for kind, at in order))
        places.append([tuple(order.index((kind, at)) for at in range(len((batch, summed)[kind]))) for kind in (0, 1)])
    return shapes, tuple((places[0][kind], places[1][kind]) for kind in (1, 0))


@given(products_of_arrays())
@settings(max_examples=60)
def test_the_values_are_the_products(product) -> None:
    shapes, numbers = product
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]
    program = inline(jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, numbers))(*args))
    (expected,), (found,) = (jax.jit(emit_of(one))(args) for one in (program, with_vectors_by_loops(program)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found.shape == expected.shape


FEW, MANY = LARGEST // 64 - 2, LARGEST // 64


@pytest.mark.parametrize(
    ("left", "right", "spec", "left_over"),
    [
        ((64,), (64, FEW), "n,nk->k", 0),
        ((64,), (64, MANY), "n,nk->k", 1),
        ((1, 64), (64, MANY), "an,nk->ak", 1),
        ((MANY * 64,), (MANY * 64,), "n,n->", 0),  # two vectors, however long
        ((4096, 1), (1, 4096), "na,ak->nk", 0),  # nothing to sum
        ((8, 64, 1), (8, 1, 64), "bna,bak->bnk", 0),
        ((8, 256), (8, 256), "bn,bn->b", 1),  # of a batch, see there
        ((2, 64), (64, 8), "an,nk->ak", 1),
        ((8, 2, 64), (8, 64), "ban,bn->ba", 1),
    ],
)
def test_which_products_are_loops(left: tuple, right: tuple, spec: str, left_over: int) -> None:
    args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right))
    program = inline(jax.make_jaxpr(lambda x, y: jnp.einsum(spec, x, y))(*args))
    assert products(program) == 1
    assert products(with_vectors_by_loops(program)) == left_over


@pytest.mark.parametrize(("given", "made"), [("bfloat16", "float32"), ("int8", "int8")])
def test_the_number_type_is_the_products(given: str, made: str) -> None:
    args = [jnp.ones((3, 4), given), jnp.ones(4, given)]
    traced = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=made))
    (found,) = jax.jit(emit_of(with_vectors_by_loops(inline(traced(*args)))))(args)
    assert found.dtype == made


def test_what_one_vector_weights_is_not_put_side_by_side() -> None:
    """As of private gradients: two products that share an operand would be one, and the others a copy beside it."""

    def weighted(scale: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("n,nk->k", scale, jnp.square(x)), jnp.einsum("n,nk->k", scale, jnp.square(y))

    shapes = (64,), (64, 1000), (64, 3000)
    avals = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    program = inline(jax.make_jaxpr(weighted)(*avals), with_barriers=True, keep_names=False)
    assert allocated_by(compiled(program, RATES, platform="cuda"), "cuda") <= 1024
