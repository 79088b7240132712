"""Steps that are lowered for devices that are not attached: on which platform they are compiled, with which options."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from remat_opt import RematWarning, optimize
from remat_opt.targets import resolve_target
from remat_opt.targets.options import platform_of

LAYERS, WIDTH = 4, 64
WHOLE = PartitionSpec()


@functools.cache
def absent_mesh(name: str) -> Mesh:
    """One absent device of a target."""
    target = resolve_target(name)
    if target.platform == "cuda":
        how = {"platform": "cuda", "target_config": target.compiler_config, "topology": "1x1x1"}
    else:
        how = {"platform": "tpu", "topology_name": target.compiler_config}
    return Mesh(np.array(topologies.get_topology_desc(**how).devices[:1]), ("device",))


def step(weights: jax.Array, x: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        h = x
        for layer in range(LAYERS):
            h = jnp.tanh(jnp.sin(h @ weights[layer]))
        return jnp.mean(h**2)

    return weights - 0.1 * jax.grad(loss)(weights)


def arguments(batch: int, sharding: Any = None) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shapes = (LAYERS, WIDTH, WIDTH), (batch, WIDTH)
    weights, x = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes)
    return weights, x


@pytest.mark.parametrize("name", ["h200", "v5e"])
def test_a_step_is_compiled_for_the_absent_device_that_its_arguments_are_on(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    on_device = arguments(2**10, NamedSharding(absent_mesh(name), WHOLE))
    plan = optimize(step, target="h200", verify=False).plan(*on_device)
    optimized = optimize(step, target=name, plan=plan, verify=False)
    assert not optimized.plan(*on_device).is_plain
    optimized.lower(*on_device).compile()
    optimized.trace(*on_device).lower().compile()
    assert not any("called on cpu" in str(warning.message) for warning in recwarn)


def test_planning_for_an_absent_device_warns_of_nothing_and_calling_does(recwarn: pytest.WarningsRecorder) -> None:
    optimized = optimize(step, target="h200", donate_argnums=0, verify=False)
    here = [jnp.ones(one.shape) for one in arguments(2**10)]
    optimized.plan(*here)
    optimized.explain(*here)
    assert not recwarn
    with pytest.warns(RematWarning, match="planned for h200, called on cpu"):
        optimized(*here)
    optimized(jnp.ones_like(here[0]), here[1])
    assert not recwarn  # it was said


def test_a_step_runs_here_and_is_compiled_for_an_absent_device() -> None:
    optimized = optimize(step)
    here = [jnp.ones(one.shape) / WIDTH for one in arguments(2**10)]
    on_device = arguments(2**10, NamedSharding(absent_mesh("h200"), WHOLE))
    expected = jax.jit(step)(*here)
    np.testing.assert_allclose(optimized(*here), expected, rtol=1e-6)
    saved = optimized.lower(*here).compile().memory_analysis().temp_size_in_bytes
    assert saved < 0.7 * jax.jit(step).lower(*here).compile().memory_analysis().temp_size_in_bytes
    with pytest.warns(RematWarning, match="planned for cpu, called on h200"):
        optimized.lower(*on_device).compile()
    # Neither takes the other's place.
    assert optimized.lower(*here).compile().memory_analysis().temp_size_in_bytes == saved
    np.testing.assert_allclose(optimized(*here), expected, rtol=1e-6)


def test_calls_on_a_second_platform_get_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one platform to call on in tests: what says which it is, is told another one at the second call."""
    refusing: list[str] = []
    jit = jax.jit

    def jit_of_another_platform(fun: Callable, **options: Any) -> Any:
        jitted = jit(fun, **options)
        passes = "xla_disable_hlo_passes" in options.get("compiler_options", {})

        @functools.wraps(jitted)
        def refuse(*args: Any) -> Any:
            if passes and refusing:
                raise jax.errors.JaxRuntimeError("Unsupported instruction opcode: opt-barrier")
            return jitted(*args)

        for name in ("trace", "lower"):
            setattr(refuse, name, getattr(jitted, name))
        return refuse

    monkeypatch.setattr(jax, "jit", jit_of_another_platform)
    here = [jnp.ones(one.shape) / WIDTH for one in arguments(2**10)]
    optimized = optimize(step)
    expected = optimized(*here)
    refusing.append("opt-barrier")
    with pytest.raises(jax.errors.JaxRuntimeError, match="opt-barrier"):
        optimized(*here)
    monkeypatch.setattr("remat_opt.callable.planned.platform_of", lambda *_: "gpu")
    for _ in range(2):
        np.testing.assert_allclose(optimized(*here), expected, rtol=1e-6)


X = jax.ShapeDtypeStruct((8,), jnp.float32)


def on(sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


def constrained(mesh: Mesh) -> Any:
    return jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, WHOLE)))


# Where the devices of a step are told, each a function of the mesh: what is jitted, its argument and the context.
Told = Callable[[Mesh], tuple[Any, Any, Any]]
IN_NONE = contextlib.nullcontext()
TOLD_BY: dict[str, Told] = {
    "arguments": lambda mesh: (jax.jit(jnp.sin), on(NamedSharding(mesh, WHOLE)), IN_NONE),
    "a single device": lambda mesh: (jax.jit(jnp.sin), on(SingleDeviceSharding(mesh.devices[0])), IN_NONE),
    "in_shardings": lambda mesh: (jax.jit(jnp.sin, in_shardings=NamedSharding(mesh, WHOLE)), X, IN_NONE),
    "out_shardings": lambda mesh: (jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, WHOLE)), X, IN_NONE),
    "a constraint": lambda mesh: (constrained(mesh), X, IN_NONE),
    "shard_map": lambda mesh: (jax.jit(jax.shard_map(jnp.sin, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)), X, IN_NONE),
    "set_mesh": lambda mesh: (jax.jit(jnp.sin), X, jax.set_mesh(mesh)),
    "default_device": lambda mesh: (jax.jit(jnp.sin), X, jax.default_device(mesh.devices[0])),
}


@pytest.mark.short
@pytest.mark.parametrize("place", TOLD_BY)
def test_options_follow_the_devices_wherever_these_are_told(place: str) -> None:
    here = Mesh(np.array(jax.devices("cpu")[:1]), ("device",))
    for mesh, platform, target in ((absent_mesh("h200"), "gpu", "cpu"), (here, "cpu", "h200")):
        jitted, x, context = TOLD_BY[place](mesh)
        with context:
            assert platform_of(jitted.trace(x), resolve_target(target)) == platform


@pytest.mark.short
def test_a_mesh_without_devices_is_of_the_target() -> None:
    on_mesh = on(NamedSharding(AbstractMesh((4,), ("device",)), WHOLE))
    assert platform_of(jax.jit(jnp.sin).trace(on_mesh), resolve_target("v5e:2x2")) == "tpu"
    for argument in (jnp.ones(8), np.ones(8), 1.0, X):
        assert platform_of(jax.jit(jnp.sin).trace(argument), resolve_target("v5e")) == "cpu"
