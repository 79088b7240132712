"""Steps on nodes of GPUs that are not here, compiled for all of them with the real compiler."""

import functools
import os
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from node_steps import LAYERS, WAYS, mesh_of, transformer

import remat_opt
from remat_opt import Plan
from remat_opt.targets import ProgramNotPortable, measure_flat, resolve_target
from remat_opt.targets.worker import _devices
from remat_opt.units import format_bytes, format_seconds

ROWS = 8  # of one device
pytestmark = pytest.mark.xdist_group("nodes")  # of one process, which plans each way once


@functools.cache
def planned(way: str | None) -> tuple[Plan, str]:
    """The plan of a way of training, `ROWS` for each part of the data axis, and what explains it."""
    axes = WAYS[way][0] if way else {}
    step, arguments = transformer(way, ROWS * axes.get("data", 1))
    optimized = remat_opt.optimize(step, donate_argnums=0, target="h200:8" if way else "h200")
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat_opt.RematWarning)
        return optimized.plan(*arguments), str(optimized.explain(*arguments))


@pytest.mark.parametrize("way", [pytest.param("FSDP", marks=pytest.mark.short), "data parallel", "tensor parallel"])
def test_each_gpu_needs_about_as_much_less_as_one_alone_and_sends_no_more(way: str) -> None:
    plan, text = planned(way)
    assert plan.target == "h200:8"
    plain, ours, alone = plan.plain_measured, plan.measured, planned(None)[0].predicted
    assert plain is not None
    assert ours is not None
    assert 1 - ours.temp_bytes / plain.temp_bytes > 0.85 * (1 - alone.peak_bytes / alone.plain_peak_bytes) > 0.75
    assert plain.collectives is not None
    assert ours.collectives is not None
    assert 0 < ours.collectives.bytes <= 1.001 * plain.collectives.bytes
    assert ours.collectives.gathers <= plain.collectives.gathers
    # The scales' small gradients are summed up in each step of the loop, which updates them, instead of at its end.
    assert ours.collectives.arrays <= plain.collectives.arrays + LAYERS + 1
    assert "sends" not in plan.note
    assert "Memory and time are those of one of 8 devices" in text
    predicted = plan.predicted
    for size in (predicted.plain_peak_bytes, predicted.peak_bytes):
        assert text.count(format_bytes(size // 8)) >= 2  # in the table, and over the curve
        assert format_bytes(size) not in text
    assert format_seconds(predicted.seconds / 8) in text
    change = f"from {format_bytes(plain.temp_bytes)} to {format_bytes(ours.temp_bytes)}"
    assert f"Temporary memory of one device goes {change}" in " ".join(text.split())
    assert Plan.from_json(plan.to_json()) == plan


def test_casts_of_divided_weights_are_gathered_about_once() -> None:
    """Of each weight in float32 the cast is what the products read, forward, again and backward."""
    mesh = mesh_of(data=8)

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def loss(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        h = x.astype(jnp.bfloat16)
        for up, down in layers:
            h = h + jnp.tanh(jnp.sin(h @ up.astype(h.dtype))) @ down.astype(h.dtype)
        return (h.astype(jnp.float32) ** 2).mean()

    def step(layers: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers, x))

    layers = [(like(32, 128), like(128, 32)) for _ in range(6)]
    plan = remat_opt.optimize(step, target="h100:8", donate_argnums=0).plan(layers, like(2048, 32))
    assert plan.measured is not None
    assert plan.plain_measured is not None
    assert plan.measured.temp_bytes < 0.5 * plan.plain_measured.temp_bytes
    sent, given = (figures.collectives for figures in (plan.measured, plan.plain_measured))
    assert sent is not None
    assert given is not None
    assert sent.gathers <= 1.3 * given.gathers  # 1.8 times where each cast was gathered for itself


def test_one_device_is_not_said_to_be_several() -> None:
    assert "devices" not in planned(None)[1]


def test_a_node_of_several_is_compiled_for_as_one_of_more_gpus() -> None:
    mesh = mesh_of(node=2, data=8)

    def like(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def step(weights: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [weights - jax.grad(lambda weights: (jnp.tanh(x @ weights) ** 2).mean())(weights)]

    avals = [like((128, 128), P()), like((4096, 128), P(("node", "data")))]
    figures = measure_flat(step, avals, donated=[0], target="h100:2x8")
    assert figures.argument_bytes == 4 * (128 * 128 + 4096 * 128 // 16)
    assert figures.collectives is not None
    assert figures.collectives.bytes == 4 * 128 * 128


def test_axes_may_be_explicit() -> None:
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with jax.sharding.use_abstract_mesh(mesh):
        assert measure_flat(lambda x: [jnp.sin(x)], [x], target="h200:8").argument_bytes == 4 * 64 * 16 // 8


def readmes_step() -> tuple[Any, tuple[Any, jax.ShapeDtypeStruct]]:
    """The README's sharded step, and its arguments with more rows on a mesh of absent devices."""
    with mock.patch.dict(os.environ):  # the module sets up devices for a process of its own
        from benchmarks.sharded_step import LAYERS, train_step
    mesh = mesh_of(data=4, model=2)

    def like(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    params = [(like((128, 512), None, "model"), like((512, 128), "model", None))] * LAYERS
    return train_step, (params, like((2**16, 128), "data", None))


@pytest.mark.parametrize("budget", [None, "140MB"])
def test_the_readmes_sharded_step_is_planned_for_a_node(budget: str | None) -> None:
    step, arguments = readmes_step()
    plan = remat_opt.optimize(step, donate_argnums=0, target="h200:8", budget=budget).plan(*arguments)
    plain, ours = plan.plain_measured, plan.measured
    assert ours is not None
    assert plain is not None
    assert plain.physical_peak_bytes > 210e6
    if budget is None:
        assert ours.temp_bytes < 0.32 * plain.temp_bytes
    else:
        assert 0.7 * 140e6 < ours.physical_peak_bytes <= 140e6
    assert ours.collectives is not None
    assert plain.collectives is not None
    assert 0 < ours.collectives.bytes <= plain.collectives.bytes
    assert ours.collectives.gathers <= plain.collectives.gathers


def test_nodes_are_read_from_the_targets_name() -> None:
    one, two = resolve_target("h200:8"), resolve_target("h100:2x8")
    assert (one.name, one.devices, one.nodes) == ("h200:8", 8, 1)
    assert (two.name, two.devices, two.nodes) == ("h100:2x8", 16, 2)
    assert (one.memory_bytes, one.flops) == (resolve_target("h200").memory_bytes, resolve_target("h200").flops)
    assert "in each of 2 nodes" in two.description


@pytest.mark.parametrize("wrong", ["0", "a", "2x", "x8", "", "2x0", "-8", "08", "2x2x8", "8 ", "٨"])
def test_other_names_of_nodes_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f'got "h200:{wrong}". Write "h200:8" for one node of eight GPUs, "h200:2x8"'):
        resolve_target(f"h200:{wrong}")


@pytest.mark.parametrize(
    ("target", "devices", "meant"), [("h200:8", 4, "h200:4"), ("h200:2x8", 8, "h200:8"), ("h200", 8, "h200:8")]
)
def test_the_mesh_has_to_have_as_many_devices_as_the_node(target: str, devices: int, meant: str) -> None:
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh_of(data=devices), P("data")))
    have = resolve_target(target).devices
    expected = f'over the {have} devices of {target}, got argument 0 .*, {devices} devices.*"{meant}"'
    with pytest.raises(ProgramNotPortable, match=expected):
        remat_opt.measure(lambda x: (x**2).sum(), x, target=target)


def test_each_node_is_a_process_of_jax() -> None:
    target = resolve_target("h100:2x8")
    devices = _devices("cuda", target.compiler_config, target.devices, target.nodes)
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8
