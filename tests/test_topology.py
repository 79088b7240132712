"""A step on a mesh of TPUs that are not here, compiled for all of them with the real compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import remat_opt
from remat_opt import Plan
from remat_opt.targets import ProgramNotPortable, TargetUnavailable, measure_flat, resolve_target

P = PartitionSpec
LAYERS, WIDTH, BATCH = 4, 128, 2**20


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        hidden = x
        for up, down in params:
            hidden = hidden + jax.nn.relu(hidden @ up) ** 2 @ down
        return (hidden**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), value


def arguments_on(mesh: AbstractMesh) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Weights along their hidden axis, the batch along the other."""

    def like(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    layer = (like((WIDTH, 4 * WIDTH), P(None, "model")), like((4 * WIDTH, WIDTH), P("model", None)))
    return [layer] * LAYERS, like((BATCH, WIDTH), P("data", None))


def mesh_of(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_a_sharded_step_needs_less_on_each_chip_of_a_topology() -> None:
    optimized = remat_opt.optimize(step, donate_argnums=0, target="v5e:4x4")
    plan = optimized.plan(*arguments_on(mesh_of(4, 4)))
    assert plan.target == "v5e:4x4"
    plain, ours = plan.plain_measured, plan.measured
    assert plain is not None
    assert ours is not None
    shared = 4 * BATCH * WIDTH // 4 + 2 * 4 * LAYERS * 4 * WIDTH * WIDTH // 4  # bytes of one chip's arguments
    assert plain.argument_bytes == pytest.approx(shared, rel=0.01)
    assert ours.temp_bytes < 0.8 * plain.temp_bytes
    assert plain.collectives is not None
    assert ours.collectives is not None
    assert 0 < ours.collectives.arrays <= plain.collectives.arrays
    assert Plan.from_json(plan.to_json()) == plan


def test_shardings_may_be_those_of_the_jit() -> None:
    params, x = arguments_on(mesh_of(4, 4))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, x))
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    optimized = remat_opt.optimize(step, in_shardings=shardings, verify=False, target="v5e:4x4")
    measured = remat_opt.measure(optimized, *bare)
    assert measured.target == "v5e:4x4"
    assert measured.optimized is not None
    assert measured.optimized.argument_bytes < 4 * BATCH * WIDTH // 2
    assert measured.optimized.collectives is not None
    assert "arrays sent between devices" in str(measured)


def test_the_mesh_has_to_have_as_many_devices_as_the_topology() -> None:
    with pytest.raises(ProgramNotPortable, match=r"over the 16 devices of v5e:4x4, got argument 0 .* 8 devices"):
        remat_opt.measure(step, *arguments_on(mesh_of(4, 2)), target="v5e:4x4")
    with pytest.raises(ProgramNotPortable, match=r"over the 1 devices of v5e, got argument 0 .* 16 devices.*v5e:4x4"):
        remat_opt.measure(step, *arguments_on(mesh_of(4, 4)), target="v5e")


def test_topologies_are_read_from_the_targets_name() -> None:
    target = resolve_target("v5e:4x4")
    assert (target.devices, target.platform, target.name) == (16, "tpu", "v5e:4x4")
    assert target.memory_bytes == resolve_target("v5e").memory_bytes
    assert resolve_target("v5p:2x2x4").devices == 16
    for wrong in ("v5e:", "v5e:4", "v5e:4x4x", "v5e:fourxfour"):
        with pytest.raises(ValueError, match=f'got "{wrong}". Write "v5e:4x4"'):
            resolve_target(wrong)
    for wrong in ("v9:4x4", "cpu:8"):
        with pytest.raises(ValueError, match=f"unknown target '{wrong}'"):
            resolve_target(wrong)


def test_a_topology_that_does_not_exist_is_told() -> None:
    with pytest.raises(TargetUnavailable, match=r"not divisible by .* or write a topology that there is"):
        measure_flat(lambda x: [x + 1], [jax.ShapeDtypeStruct((8,), jnp.float32)], target="v5e:3x7")
