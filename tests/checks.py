"""What many tests look at: values of trees, memory of compiled steps, equations of jaxprs, what a child prints."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from remat_opt import Plan
from remat_opt.trace import compat

TESTS = Path(__file__).parent
T = TypeVar("T")


def by_jax(oldest: T, newest: T) -> T:
    """A figure of XLA's, or what follows from one, in jax 0.10 and from 0.11 on."""
    return oldest if jax.__version_info__ < (0, 11) else newest


def numbers(leaf: Any) -> np.ndarray:
    """A leaf as a NumPy array; of a random key its data."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The same tree, shapes and dtypes, and values within rounding."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(numbers(one), numbers(other), rtol=rtol, atol=atol)


def temp_bytes(fun: Any, *args: Any, **kwargs: Any) -> int:
    """Temporary memory of a jitted function, by the compiler of this machine."""
    compiled = fun.lower(*args, **kwargs).compile()
    compiled = getattr(compiled, "compiled", compiled)  # flax's and equinox's own objects hold JAX's
    return compiled.memory_analysis().temp_size_in_bytes


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, inner ones included."""
    for equation in compat.bare_jaxpr(jaxpr).eqns:
        yield equation
        for inner in compat.jaxprs_in(equation.params):
            yield from equations_in(inner)


def checkpoints_in(fun: Any, *args: Any) -> int:
    """How many `jax.checkpoint` regions a function has when it is traced, inner ones included."""
    return sum(one.primitive is compat.remat_p for one in equations_in(jax.make_jaxpr(fun)(*args)))


def printed(program: str, *arguments: str, **environment: str) -> str:
    """What a child process prints; `program` is its source, which may import the modules of the tests."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


def planned(plan: Plan) -> str:
    """A plan's text without the seconds that compiling took, for comparing plans of several processes."""
    figures = {name: getattr(plan, name) for name in ("measured", "plain_measured")}
    timeless = {name: found and dataclasses.replace(found, compile_seconds=0.0) for name, found in figures.items()}
    return dataclasses.replace(plan, **timeless).to_json()


def filled(shapes: Any) -> Any:
    """Some state of these shapes: initialising would be one more program to compile."""
    random = np.random.default_rng(0)

    def one(leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return (0.1 * random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    return jax.tree.map(one, shapes)
