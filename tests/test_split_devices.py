"""Batches that a mesh divides: which devices have which rows, and what is refused. No device is needed for it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from split_checks import sgd

from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import check_settings
from remat_opt.planner.splitting import in_chunks, note_of_split
from remat_opt.planner.step import read_step
from remat_opt.rewrites.split.batch import Batch
from remat_opt.rewrites.split.devices import Devices

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, WIDTH = 96, 8


def placed(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))


def prepared_of(loss: Any, *args: Any) -> Prepared:
    return read_step(jax.jit(sgd(loss)).trace(*args), check_settings(target=None, solver="auto"), {}, (args, {}))


def weighted(p: jax.Array, x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.mean(jnp.tanh(x @ p) ** 2, -1) * weights) / jnp.sum(weights)


def constrained(p: jax.Array, x: jax.Array) -> jax.Array:
    x = lax.with_sharding_constraint(x, NamedSharding(MESH, P("data")))
    return jnp.mean(jnp.tanh(jnp.tanh(x @ p) @ p) ** 2)


def weighted_step(x: P, weights: P, rows: int = ROWS) -> Prepared:
    return prepared_of(weighted, placed(P(), WIDTH, WIDTH), placed(x, rows, WIDTH), placed(weights, rows))


def batch_of(prepared: Prepared) -> Batch:
    assert prepared.batch is not None
    return prepared.batch


def test_rows_are_those_of_one_device() -> None:
    prepared = weighted_step(P("data"), P())
    assert batch_of(prepared).devices == Devices(MESH, ("data",))
    assert batch_of(prepared).numbers == (2, 3, 4, 6, 8, 12, 24)
    assert "runs in 2 chunks on each of 4 devices" in note_of_split(prepared, 2)
    assert batch_of(weighted_step(P(("data", "model")), P(("data", "model")))).rows_of_device == 12
    assert batch_of(weighted_step(P(None, "model"), P())).devices is None


def test_no_device_reads_rows_of_another() -> None:
    """Its part goes into the `shard_map`, weights go in whole, and sums come out as one part of each device."""
    (loop,) = [
        one for one in batch_of(weighted_step(P("data"), P())).split(3).equations if one.primitive.name == "shard_map"
    ]
    assert {*loop.params["in_specs"]} == {P(("data",)), P()}
    assert {*loop.params["out_specs"]} == {P(("data",))}
    assert loop.params["newly_manual_axes"] == {"data"}


def test_a_constraint_says_where_rows_are_too() -> None:
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    prepared = prepared_of(constrained, jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), x)
    assert batch_of(prepared).devices == Devices(MESH, ("data",))


@pytest.mark.parametrize(
    ("step", "chunks", "instead"),
    [
        (lambda: weighted_step(P("data"), P()), 5, "divides the 24 rows of each device, got split=5. Write split=4 or"),
        (lambda: weighted_step(P("data"), P()), 25, "at most 24 chunks, as each device has rows, got split=25"),
        (lambda: weighted_step(P("data"), P(), rows=4), 2, "Write split=False"),
        (
            lambda: weighted_step(P("data"), P("model")),
            2,
            "got .*data.* for some and .*model.* for others",
        ),
        (
            lambda: prepared_of(constrained, placed(P(), WIDTH, WIDTH), placed(P(), 90, WIDTH)),
            2,
            "that 4 devices divide evenly, got one of 90. Write split=False",
        ),
    ],
)
def test_what_devices_cannot_split_is_refused(step: Any, chunks: int, instead: str) -> None:
    with pytest.raises(ValueError, match=instead):
        in_chunks(step(), chunks)
