"""One of two processes that are connected, each with four devices; prints what it planned and computed, as JSON.

`python -m tests.pods PORT NUMBER` from the checkout, for NUMBER 0 and 1; `test_pods.py` reads what they print.
"""

import json
import os
import sys
from typing import Any

from benchmarks import devices_on_cpu

os.environ.update(devices_on_cpu.environment(4))

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat_opt
from tests.checks import planned

P = PartitionSpec
LAYERS, WIDTH, BATCH = 4, 16, 512


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        hidden = x
        for weight in params:
            hidden = jnp.tanh(jnp.sin(hidden @ weight))
        return (hidden**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), value


def main(port: str, number: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    options = {"in_shardings": (whole, split), "out_shardings": whole}

    def new_params() -> list[jax.Array]:
        return [0.3 * jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(LAYERS)]

    params = jax.jit(new_params, out_shardings=whole)()
    x = jax.jit(lambda: jax.random.normal(jax.random.key(9), (BATCH, WIDTH)), out_shardings=split)()
    plain, optimized = jax.jit(step, **options), remat_opt.optimize(step, **options)
    losses, value = [], None
    for function in (plain, optimized):
        state = params
        for _ in range(2):
            state, value = function(state, x)
        losses.append(float(value))
    plan = optimized.plan(params, x)
    print(
        json.dumps(
            {
                "processes": jax.process_count(),
                "devices": jax.device_count(),
                "losses": losses,
                "plan": planned(plan),
                "recomputes": not plan.is_plain,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
