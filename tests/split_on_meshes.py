"""Steps of `test_split.py` on a mesh, in the process of `meshes.py`: values in chunks, compared with one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_split import CASES

from remat_opt.rewrites.captured import capture
from remat_opt.rewrites.split.batch import Batch, find_batch
from remat_opt.targets.communication import read_collectives
from remat_opt.trace.evaluation import evaluate_all
from tests.checks import numbers

CHUNKS = 3


def compare_in_chunks(case_name: str, axes: AxisType) -> dict[str, Any]:
    """The largest difference between a step on one device and in chunks on a mesh, and bytes sent without and with."""
    with jax.enable_x64(True):
        case = CASES[case_name]
        args = case.args()
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axes,) * 2)
        expected = jax.tree.leaves(jax.jit(case.step)(*args))
        whole = find_batch(capture(jax.jit(case.step), args, {}).program)
        assert whole is not None
        of_rows = dict(whole.arguments)
        leaves, tree = jax.tree.flatten(args)
        specs = [PartitionSpec(*[None] * of_rows[at], "data") if at in of_rows else None for at in range(len(leaves))]
        shardings = [NamedSharding(mesh, spec or PartitionSpec()) for spec in specs]
        leaves = [jax.device_put(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
        with jax.set_mesh(mesh):
            batch = find_batch(capture(jax.jit(case.step), jax.tree.unflatten(tree, leaves), {}).program, shardings)
            assert batch is not None
            return {"chunks of": batch.rows_of_device, **_compared(batch, leaves, expected)}


def _compared(batch: Batch, leaves: list[Any], expected: list[Any]) -> dict[str, Any]:
    sent, found = [], []
    for program in (batch.program, batch.split(CHUNKS)):
        compiled = jax.jit(lambda *arrays, program=program: evaluate_all(program, arrays)).lower(*leaves).compile()
        sent.append(read_collectives(compiled.as_text()).bytes)
        found = compiled(*leaves)
    pairs = [(numbers(jnp.asarray(a)), numbers(jnp.asarray(b))) for a, b in zip(found, expected, strict=True)]
    floats = [np.max(np.abs(a - b), initial=0.0) for a, b in pairs if b.dtype.kind == "f"]
    exact = all(np.array_equal(a, b) for a, b in pairs if b.dtype.kind != "f")
    return {"difference": float(max(floats)), "exact": exact, "bytes sent": sent}
