"""What must hold of a program whose batch is split: values, types, and a loop where there has to be one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checks import numbers

from remat_opt.rewrites.split.batch import Batch, find_batch
from remat_opt.trace import compat
from remat_opt.trace.evaluation import evaluate_all
from remat_opt.trace.inline import Program, inline


def program_of(fun: Callable, *args: Any) -> Program:
    return inline(compat.without_dead_code(jax.make_jaxpr(fun)(*args)))


def sgd(loss: Callable) -> Callable:
    """`(params, *batch) -> (params, loss)`."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape))


def assert_same(program: Program, other: Program, leaves: Sequence[Any], rtol: float = 1e-12) -> None:
    """The results of two programs: floating point within rounding (1e-5 in float32), all else and types alike."""
    assert_all_close(run(other, leaves), run(program, leaves), rtol)


def assert_all_close(results: Sequence[Any], others: Sequence[Any], rtol: float = 1e-12) -> None:
    """The same of arrays."""
    found, expected = ([numbers(jnp.asarray(x)) for x in arrays] for arrays in (results, others))
    for at, (one, ours) in enumerate(zip(expected, found, strict=True)):
        assert (one.dtype, one.shape) == (ours.dtype, ours.shape), at
        if one.dtype.kind == "f":
            rtol = 1e-5 if one.dtype == np.float32 else rtol
            np.testing.assert_allclose(ours, one, rtol=rtol, atol=rtol, err_msg=f"result {at}")
        else:
            np.testing.assert_array_equal(ours, one, err_msg=f"result {at}")


def run(program: Program, leaves: Sequence[Any]) -> list[Any]:
    return jax.jit(lambda *arrays: evaluate_all(program, arrays))(*leaves)


def check_split(fun: Callable, *args: Any, chunks: Sequence[int] = (2, 3)) -> Batch:
    """Split a function's batch and compare; the batch. To be called with 64-bit types."""
    program = program_of(fun, *args)
    batch = find_batch(program)
    assert batch is not None
    assert batch.stages.in_loops
    for number in chunks:
        assert_same(program, batch.split(number), jax.tree.leaves(args))
    return batch
