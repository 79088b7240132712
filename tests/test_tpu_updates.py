"""Results that take the place of what a TPU's loops carry and of donated arguments, against the compiler itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

WIDE = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)


def in_turns(turn: Callable[[jax.Array], jax.Array], carry: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (turn(carry), None), carry, None, length=5)[0]


@pytest.mark.parametrize(
    ("function", "donated", "arrays"),
    [
        # In halves of an array of four bytes an element: the weights in two, and what is made beside the carry.
        pytest.param(lambda x, w: in_turns(lambda c: jnp.tanh(c @ w), x), (), 1 + 2, id="product of a carry"),
        pytest.param(lambda x, w: in_turns(lambda c: c + jnp.tanh(c @ w), x), (), 1 + 2, id="which is read beside"),
        pytest.param(lambda x, w: in_turns(lambda c: jnp.tanh(c @ w), x).sum(), (), 1 + 4, id="that is no result"),
        pytest.param(
            lambda x, w: in_turns(lambda c: jnp.tanh(jnp.tanh(c @ w) @ w), x), (), 1 + 1, id="of two products"
        ),
        pytest.param(lambda x, w: in_turns(lambda c: c + (c.sum() * w) @ w, x), (), 0, id="beside a product"),
        pytest.param(lambda x, w: jnp.tanh(x @ w), (0,), 2, id="donated"),
        pytest.param(lambda x, w: x + w @ w, (0,), 0, id="donated beside a product"),
    ],
)
def test_no_product_is_written_over_its_operand(function: Callable, donated: tuple[int, ...], arrays: int) -> None:
    foreseen, found = foreseen_and_compiled(function, WIDE, WIDE, donated=donated)
    assert found == pytest.approx(arrays * WIDE.size * 2, abs=2**20)
    assert foreseen == pytest.approx(found, abs=2**20)
