"""Run in a process of its own, with eight devices on the CPU: prints one line of JSON for each sharded step asked for.

`python -m tests.meshes "data and model"` from the checkout, or without a name for those that come on the standard
input, a line each; `test_meshes.py` reads what it prints.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import devices_on_cpu

os.environ.update(devices_on_cpu.environment(8))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat_opt.callable.planned
from remat_opt.targets import compile_lowered, resolve_target
from remat_opt.targets.communication import read_collectives
from tests.checks import equations_in

LAYERS, WIDTH, BATCH = 5, 32, 2048
OPTIMIZER = optax.adam(1e-2)
P = PartitionSpec


def new_state() -> Any:
    def normal(seed: int, *shape: int) -> np.ndarray:
        return 0.1 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)

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


def step_of(loss: Callable[[Any, jax.Array], jax.Array], of_gradients: Callable[[Any], Any] = lambda tree: tree) -> Any:
    """The step of a loss; `of_gradients` says where its gradients are."""

    def step(state: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(state[0], x)
        return updated(state, of_gradients(gradients)), value

    return step


step = step_of(loss)


def of_one_device(state: Any, x: jax.Array) -> Any:
    """The data-parallel step as each device runs it."""
    varying = lax.pcast(state[0], "data", to="varying")
    value, gradients = jax.value_and_grad(loss)(varying, x)
    return updated(state, lax.pmean(gradients, "data")), lax.pmean(value, "data")


def layer_of_one_device(x: jax.Array, layer: Any) -> jax.Array:
    """A layer whose hidden axis is divided by hand: its result is a sum over devices, passed round a ring and back."""
    part = jnp.tanh(jnp.sin(x @ layer["up"])) @ layer["down"]
    there = lax.ppermute(part, "data", [(i, (i + 1) % 8) for i in range(8)])
    return x + lax.psum(jnp.sin(there), "data")


def explicit(layer: Callable[[jax.Array, Any], jax.Array], looped: bool) -> Callable[[Any, jax.Array], Any]:
    """A step of mapped layers that is differentiated from outside, its layers one by one or in a loop."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if looped:
            params = jax.tree.map(lambda *layers: jnp.stack(layers), *params)
            x = lax.scan(lambda x, one: (layer(jnp.sin(jnp.cos(x)), one), None), x, params)[0]
        else:
            for one in params:
                x = layer(jnp.sin(jnp.cos(x)), one)
        return (x**2).mean()

    return step_of(loss)


def typed_loss(params: Any, x: jax.Array) -> jax.Array:
    """The same for a mesh of explicit axes, which are in the types of all arrays."""
    for layer in params:
        hidden = jnp.tanh(jnp.sin(x @ layer["up"]))
        x = x + jnp.dot(hidden, layer["down"], out_sharding=P("data", None))
    return (x**2).mean()


def resharded(tree: Any, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec), tree)


typed_step = step_of(typed_loss)
# Of weights whose rows are divided among explicit axes: the step says itself where they are gathered.
gathering_step = step_of(lambda params, x: loss(resharded(params, P()), x), lambda tree: resharded(tree, P("data")))


def looped_loss(params: Any, x: jax.Array) -> jax.Array:
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *params)

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(jnp.sin(x @ one["up"])) @ one["down"], None

    return (lax.scan(layer, x, stacked)[0] ** 2).mean()


looped_step = step_of(looped_loss)


def specs_of(state: Any, by_model: bool) -> Any:
    """Weights along their hidden axis where `by_model`, else whole on every device."""

    def spec(path: Any, leaf: jax.Array) -> PartitionSpec:
        if not by_model or leaf.ndim < 2:
            return P()
        return P(None, "model") if "up" in jax.tree_util.keystr(path) else P("model", None)

    return jax.tree_util.tree_map_with_path(spec, state)


COLLECTIVES = {"psum", "psum_invariant", "ppermute", "all_gather", "reduce_scatter", "all_to_all"}


def explicit_collectives(jaxpr: Any) -> int:
    """How many are written in a jaxpr, each in a loop once."""
    return sum(equation.primitive.name in COLLECTIVES for equation in equations_in(jaxpr))


def compiled_collectives(text: str) -> int:
    """How many arrays the all-reduces of a compiled program without loops sum up over devices."""
    return sum(found.count("%") for found in re.findall(r" all-reduce\(([^)]*)\)", text))


def compare(
    name: str,
    mesh: Any,
    fun: Any,
    specs: Any,
    batch: PartitionSpec,
    *,
    by_spec: bool = False,
    from_plan: bool = False,
    **ours: Any,
) -> None:
    """Run a step plain and optimised, donated, and print what is the same and what is less.

    Args:
        name: of the step.
        mesh: of the devices.
        fun: the step.
        specs: of the state.
        batch: of the batch.
        by_spec: whether its jit is told partitions alone, of a mesh that is set.
        from_plan: whether it is optimised by its plan, which was saved and loaded.
        **ours: options of `optimize`.
    """
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, batch))
    options: dict[str, Any] = {
        "in_shardings": (specs, batch) if by_spec else shardings,
        "out_shardings": (specs, P()) if by_spec else (shardings[0], NamedSharding(mesh, P())),
        "donate_argnums": 0,
    }
    x = jax.device_put(jax.random.normal(jax.random.key(9), (BATCH, WIDTH)), shardings[1])
    functions = jax.jit(fun, **options), remat_opt.optimize(fun, **options, **ours)
    if from_plan:
        plan = functions[1].plan(jax.device_put(new_state(), shardings[0]), x)
        functions = functions[0], remat_opt.optimize(fun, **options, plan=remat_opt.Plan.from_json(plan.to_json()))
    results, temporary, explicit, texts, value = [], [], [], [], None
    for function in functions:
        state = jax.device_put(new_state(), shardings[0])
        explicit.append(explicit_collectives(function.trace(state, x).jaxpr.jaxpr))
        compiled = function.lower(state, x).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        texts.append(compiled.as_text())
        for _ in range(2):
            state, value = function(state, x)
        results.append(jax.tree.leaves((state, value)))
    pairs = list(zip(*results, strict=True))
    plan = functions[1].plan(jax.device_put(new_state(), shardings[0]), x)
    print(
        json.dumps(
            {
                "name": name,
                "devices": len({shard.device for shard in results[1][0].addressable_shards}),
                "plain": temporary[0],
                "ours": temporary[1],
                "explicit collectives": explicit,
                "all-reduces": list(map(compiled_collectives, texts)),
                "collectives": [read_collectives(text).arrays for text in texts],
                "bytes sent": [read_collectives(text).bytes for text in texts],
                "chunks": plan.chunks,
                "note": plan.note,
                "difference": max(float(jnp.abs(one - other).max()) for one, other in pairs),
                "same shardings": all(one.sharding.is_equivalent_to(other.sharding, one.ndim) for one, other in pairs),
            }
        ),
        flush=True,
    )


BUDGETS = (0.3, "15MB", "6MB")


def compare_budgets(name: str) -> None:
    """Plan a step of 16 layers, its batch divided among all devices, for budgets; print what one device needs."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    weights = [0.1 * jax.random.normal(jax.random.key(i), (64, 64)) for i in range(16)]
    state = jax.device_put((weights, OPTIMIZER.init(weights)), NamedSharding(mesh, P()))
    x = jax.device_put(jax.random.normal(jax.random.key(99), (8192, 64)), NamedSharding(mesh, P("data")))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(jnp.sin(x @ w) * x)
        return (x**2).mean()

    step = step_of(loss)
    found: dict[str, Any] = {"name": name}
    compiling, counted = remat_opt.callable.planned.compile_as_called, []
    remat_opt.callable.planned.compile_as_called = lambda *args: (counted.append(args), compiling(*args))[1]
    for budget in BUDGETS:
        counted.clear()
        plan = remat_opt.optimize(step, donate_argnums=0, budget=budget).plan(state, x)
        figures = plan.measured or plan.plain_measured
        found[str(budget)] = {
            "is plain": plan.is_plain,
            "compiled": len(counted),
            "plain temporary": plan.plain_measured and plan.plain_measured.temp_bytes,
            "temporary": figures.temp_bytes,
            "peak": figures.physical_peak_bytes,
            "extra": plan.predicted.extra_flops / plan.predicted.flops,
            "chunks": plan.chunks,
        }
    print(json.dumps(found), flush=True)


def compare_batches(name: str) -> None:
    """Find the largest batch of a step of three layers on a mesh, and print what one device needs."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = jax.eval_shape(new_state)[0][:3]
    state = params, jax.eval_shape(OPTIMIZER.init, params)
    state, x = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        (state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)),
        (specs_of(state, True), P("data")),
    )

    def make_args(batch: int) -> tuple[Any, Any]:
        return state, jax.ShapeDtypeStruct((batch, WIDTH), x.dtype, sharding=x.sharding)

    found = remat_opt.largest_batch(step, make_args, "4MB", multiple_of=64, donate_argnums=0)
    lowered = jax.jit(step, donate_argnums=0).lower(*make_args(found.batch))
    plain = compile_lowered(lowered, resolve_target("cpu"))
    print(
        json.dumps(
            {
                "name": name,
                "batch": found.batch,
                "plain batch": found.plain and found.plain.batch,
                "compilations": [found.compilations, found.misses],
                "peaks": [plain.physical_peak_bytes, found.measured.physical_peak_bytes],
                "collectives": [plain.collectives.arrays, found.measured.collectives.arrays],
            }
        ),
        flush=True,
    )


def run(name: str) -> None:
    if name == "largest batch":
        return compare_batches(name)
    if name == "budgets":
        return compare_budgets(name)
    if name.startswith("values of "):
        from tests.split_on_meshes import compare_in_chunks

        kind = AxisType.Explicit if name.endswith(", explicit axes") else AxisType.Auto
        case = name.removeprefix("values of ").removesuffix(", explicit axes")
        return print(json.dumps({"name": name, **compare_in_chunks(case, kind)}), flush=True)
    kind = name.removesuffix(", repeated").removesuffix(", from its plan").removesuffix(", split")
    ours: dict[str, Any] = {"repeat_collectives": True} if name.endswith("repeated") else {}
    ours |= {"budget": 0.5} if name == "explicit, repeated" else {}  # one more forward pass does not reach so far
    ours |= {"split": 4} if name.endswith("split") else {}
    state = jax.eval_shape(new_state)
    if kind in ("data", "model", "data and model", "model, in a loop"):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        batch = {"data": P(("data", "model")), "data and model": P("data")}.get(kind, P())
        fun = looped_step if kind.endswith("loop") else step
        return compare(name, mesh, fun, specs_of(state, kind != "data"), batch, **ours)
    if kind in ("set_mesh", "set_mesh, explicit axes"):
        axes = AxisType.Auto if kind == "set_mesh" else AxisType.Explicit
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)
        with jax.set_mesh(mesh):
            fun = step if kind == "set_mesh" else typed_step
            return compare(name, mesh, fun, specs_of(state, True), P("data", None), by_spec=True, **ours)
    line = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    by_rows = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), state)
    if kind == "weights by data, explicit axes":
        typed = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(typed):
            return compare(name, typed, gathering_step, by_rows, P("data", None), by_spec=True, **ours)
    if kind == "weights by data, half":
        return compare(name, line, step, by_rows, P("data"), budget=0.5)
    if kind in ("weights by data", "weights by data, in a loop"):
        fun = looped_step if kind.endswith("loop") else step
        return compare(name, line, fun, by_rows, P("data"), from_plan=name.endswith("plan"), **ours)
    if kind == "shard_map":
        mapped = jax.shard_map(of_one_device, mesh=line, in_specs=(P(), P("data")), out_specs=(P(), P()))
        return compare(name, line, mapped, specs_of(state, False), P("data"), **ours)
    weights = {"up": P(None, "data"), "down": P("data", None)}
    layer = jax.shard_map(layer_of_one_device, mesh=line, in_specs=(P(), weights), out_specs=P())
    fun = explicit(layer, looped=kind == "explicit, in a loop")
    return compare(name, line, fun, specs_of(state, False), P(), **ours)


if __name__ == "__main__":
    for asked in sys.argv[1:] or map(str.strip, sys.stdin):
        run(asked)
