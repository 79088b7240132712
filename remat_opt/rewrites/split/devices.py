"""Rows that a mesh divides: each device runs a loop over its own chunks, in a `shard_map` over the axes of the batch.

The rows of D devices in k chunks each are D · k contiguous chunks, of which a device has k in a row: no row moves, and
a chunk of number d · k + i draws and counts by its place in the batch as on one device. Sums are carried by each device
and added up over devices once, after the loop; written as a loop over divided arrays, the compiler would add them up in
every turn. Other axes of the mesh stay the compiler's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from remat_opt.trace.inline import Equation


class NotDivisible(ValueError):
    """Rows that are divided in a way in which no chunks can be taken."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices that the rows of the batch are divided among.

    Attributes:
        mesh: theirs.
        axes: those that the rows are divided over, major first.
    """

    mesh: Any
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Parts that the rows are divided into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def spec(self, axis: int | None) -> PartitionSpec:
        """The partition of an array whose axis holds the rows, or of one that is whole on every device."""
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axes)

    def mapped(self, fun: Callable, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec]) -> Callable:
        """A function that each device runs on its part. What must be whole is gathered first."""
        inner = jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=tuple(out_specs),
            axis_names={*self.axes},
            check_vma=False,
        )
        return lambda *arrays: inner(*(self._typed(x, spec) for x, spec in zip(arrays, in_specs, strict=True)))

    def _typed(self, array: Any, spec: PartitionSpec) -> Any:
        """An array whose type says that it is divided over these axes as in `spec`; others say nothing of devices."""
        own = jax.typeof(array).sharding
        if own.mesh.empty:  # an array that is not of the program
            own = NamedSharding(self.mesh, PartitionSpec(*[None] * jax.numpy.ndim(array)))
        wanted = list(self.without(own.spec))
        if spec:
            wanted[len(spec) - 1] = spec[-1]
        return as_typed(array, NamedSharding(own.mesh, PartitionSpec(*wanted)))

    def without(self, spec: PartitionSpec) -> PartitionSpec:
        """A partition as it is for one of these devices."""

        def left(entry: Any) -> Any:
            names = names_in(entry)
            kept = tuple(name for name in names if name not in self.axes)
            return entry if kept == names else kept or None

        return PartitionSpec(*map(left, spec))

    def on_one(self, equation: Equation) -> Equation:
        """An equation as each device runs it; parameters may name the mesh."""
        params = {name: self._on_one(value) for name, value in equation.params.items()}
        return dataclasses.replace(equation, params=params)

    def _on_one(self, value: Any) -> Any:
        if isinstance(value, NamedSharding) and not value.mesh.empty:
            return NamedSharding(jax.sharding.get_abstract_mesh(), self.without(value.spec))
        is_mesh = isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) and not value.empty
        return jax.sharding.get_abstract_mesh() if is_mesh else value

    def sharding_of(self, aval: Any) -> Any:
        """Of a value's part, where its type says it; else None."""
        if not has_explicit_axes(getattr(aval, "sharding", None)):
            return None
        return NamedSharding(jax.sharding.get_abstract_mesh(), self.without(aval.sharding.spec))


def as_typed(array: Any, sharding: Any) -> Any:
    """An array of which the type says where it is; the array itself where types do not."""
    own = jax.typeof(array).sharding
    if not has_explicit_axes(sharding) or own.spec == sharding.spec:
        return array
    return jax.sharding.reshard(array, sharding)


def has_explicit_axes(sharding: Any) -> bool:
    """Whether a sharding is one of a mesh with axes that are in the types of arrays."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types


def names_in(entry: Any) -> tuple[str, ...]:
    """Axes of a mesh that one axis of an array is divided over."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def devices_of(placed: Mapping[Any, tuple[Any, int]]) -> Devices | None:
    """The devices that rows are divided among; None where every device has all of them.

    Args:
        placed: by a name of theirs arrays of rows: a sharding, and the axis of the rows.

    Raises:
        NotDivisible: arrays are divided over different axes, or not by a `NamedSharding`.
    """
    found: dict[Devices, Any] = {}
    for name, (sharding, axis) in placed.items():
        if sharding is None or sharding.is_fully_replicated:
            continue
        if not isinstance(sharding, NamedSharding):
            raise NotDivisible(f"expected jax.sharding.NamedSharding for arrays with the batch, got {sharding}")
        names = names_in(sharding.spec[axis]) if axis < len(sharding.spec) else ()
        names = tuple(one for one in names if sharding.mesh.shape[one] > 1)
        if names:
            found.setdefault(Devices(sharding.mesh, names), name)
    if len({one.axes for one in found}) > 1:
        first, other = list(found)[:2]
        raise NotDivisible(
            f"expected all arrays with the batch to be divided over the same axes, got {first.axes} for "
            f"{found[first]} and {other.axes} for {found[other]}"
        )
    return next(iter(found), None)
