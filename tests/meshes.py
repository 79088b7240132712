"""Run in a process of its own, with eight devices on the CPU: prints one line of JSON for each sharded step.

`python -m tests.meshes` from the checkout; `test_meshes.py` reads what it prints.
"""

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat_opt

LAYERS, WIDTH, BATCH = 8, 32, 2048
OPTIMIZER = optax.adam(1e-2)
P = PartitionSpec


def new_state() -> Any:
    def normal(seed: int, *shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(jax.random.key(seed), shape)

    params = [
        {"up": normal(2 * i, WIDTH, 4 * WIDTH), "down": normal(2 * i + 1, 4 * WIDTH, WIDTH)} for i in range(LAYERS)
    ]
    return params, OPTIMIZER.init(params)


def loss(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = x + jnp.tanh(jnp.sin(x @ layer["up"])) @ layer["down"]
    return (x**2).mean()


def updated(state: Any, gradients: Any) -> Any:
    params, moments = state
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments


def step(state: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(state[0], x)
    return updated(state, gradients), value


def of_one_device(state: Any, x: jax.Array) -> Any:
    """The data-parallel step as each device runs it."""
    varying = lax.pcast(state[0], "data", to="varying")
    value, gradients = jax.value_and_grad(loss)(varying, x)
    return updated(state, lax.pmean(gradients, "data")), lax.pmean(value, "data")


def specs_of(state: Any, by_model: bool) -> Any:
    """Weights along their hidden axis where `by_model`, else whole on every device."""

    def spec(path: Any, leaf: jax.Array) -> PartitionSpec:
        if not by_model or leaf.ndim < 2:
            return P()
        return P(None, "model") if "up" in jax.tree_util.keystr(path) else P("model", None)

    return jax.tree_util.tree_map_with_path(spec, state)


def compare(name: str, mesh: Any, fun: Any, specs: Any, batch: PartitionSpec) -> None:
    """Run a step plain and optimised, donated, and print what is the same and what is less."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, batch))
    options = {
        "in_shardings": shardings,
        "out_shardings": (shardings[0], NamedSharding(mesh, P())),
        "donate_argnums": 0,
    }
    plain, ours = jax.jit(fun, **options), remat_opt.optimize(fun, **options)
    x = jax.device_put(jax.random.normal(jax.random.key(9), (BATCH, WIDTH)), shardings[1])
    results, temporary, value = [], [], None
    for function in (plain, ours):
        state = jax.device_put(new_state(), shardings[0])
        temporary.append(function.lower(state, x).compile().memory_analysis().temp_size_in_bytes)
        for _ in range(2):
            state, value = function(state, x)
        results.append(jax.tree.leaves((state, value)))
    pairs = list(zip(*results, strict=True))
    print(
        json.dumps(
            {
                "name": name,
                "devices": len({shard.device for shard in results[1][0].addressable_shards}),
                "plain": temporary[0],
                "ours": temporary[1],
                "difference": max(float(jnp.abs(one - other).max()) for one, other in pairs),
                "same shardings": all(one.sharding.is_equivalent_to(other.sharding, one.ndim) for one, other in pairs),
            }
        ),
        flush=True,
    )


def main() -> None:
    state = jax.eval_shape(new_state)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    compare("data", mesh, step, specs_of(state, False), P(("data", "model")))
    compare("model", mesh, step, specs_of(state, True), P())
    compare("data and model", mesh, step, specs_of(state, True), P("data"))
    line = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(of_one_device, mesh=line, in_specs=(P(), P("data")), out_specs=(P(), P()))
    compare("shard_map", line, mapped, specs_of(state, False), P("data"))


if __name__ == "__main__":
    main()
