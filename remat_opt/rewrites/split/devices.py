"""Rows that a mesh divides: each device runs a loop over its own chunks, in a `shard_map` over the axes of the batch.

The rows of D devices in k chunks each are D · k contiguous chunks, of which a device has k in a row: no row moves, and
a chunk of number d · k + i draws and counts by its place in the batch as on one device. Sums are carried by each device
and added up over devices once, after the loop; written as a loop over divided arrays, the compiler would add them up in
every turn. Other axes of the mesh stay the compiler's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import primitives as P
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from remat_opt.trace import compat
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
        # On a mesh of explicit axes the context has them as the compiler's here (`untyped`).
        context = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            fun,
            mesh=self.mesh if context.empty else context,
            in_specs=tuple(in_specs),
            out_specs=tuple(out_specs),
            axis_names={*self.axes},
            check_vma=False,
        )


def untyped(fun: Callable, avals: Sequence[Any]) -> Callable:
    """A function in which no type says where an array is on a mesh: that is left to the compiler.

    Beside axes of a `shard_map`, others that are in the types are gathered where it begins and ends (jax 0.10).

    Args:
        fun: returns a tuple.
        avals: of its results.
    """
    shardings = tuple(aval.sharding for aval in avals)
    axes = {name for one in shardings for name in explicit_axes(one.mesh)}
    return jax.sharding.auto_axes(fun, axes=tuple(axes), out_sharding=shardings) if axes else fun


def as_here(equation: Equation) -> Equation:
    """An equation whose parameters name a mesh, for the part of an array that is there in the context of a loop."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return equation
    if equation.primitive is compat.reshard_p and explicit_axes(equation.params["dst_sharding"].mesh):
        return dataclasses.replace(equation, primitive=P.copy_p, params={})
    is_constraint = equation.primitive is compat.sharding_constraint_p
    params = {name: _as_here(value, mesh, is_constraint) for name, value in equation.params.items()}
    return dataclasses.replace(equation, params=params)


def _as_here(value: Any, mesh: Any, is_constraint: bool) -> Any:
    if isinstance(value, NamedSharding) and not value.mesh.empty:
        if explicit_axes(value.mesh) - explicit_axes(mesh) and not is_constraint:
            return None
        return NamedSharding(mesh, PartitionSpec(*(_without(entry, mesh.manual_axes) for entry in value.spec)))
    is_mesh = isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) and not value.empty
    return mesh if is_mesh else value


def _without(entry: Any, axes: Sequence[str]) -> Any:
    names = names_in(entry)
    kept = tuple(name for name in names if name not in axes)
    return entry if kept == names else kept or None


def explicit_axes(mesh: Any) -> set[str]:
    """Axes of a mesh that are in the types of arrays."""
    kinds = () if mesh.empty else mesh.axis_types
    return {name for name, kind in zip(mesh.axis_names, kinds, strict=False) if kind is AxisType.Explicit}


def as_varying(array: Any, aval: Any) -> Any:
    """A new array of a type that says over which axes of the user's `shard_map` a value varies."""
    axes = getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else array


def names_in(entry: Any) -> tuple[str, ...]:
    """Axes of a mesh that one axis of an array is divided over."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def devices_of(placed: Iterable[tuple[Any, int]]) -> Devices | None:
    """The devices that rows are divided among; None where every device has all of them.

    Args:
        placed: of arrays of rows the sharding, and the axis of the rows.

    Raises:
        NotDivisible: arrays are divided over different axes, or not by a `NamedSharding`.
    """
    found: set[Devices] = set()
    for sharding, axis in placed:
        if sharding is None or sharding.is_fully_replicated:
            continue
        if not isinstance(sharding, NamedSharding):
            raise NotDivisible(
                f"expected jax.sharding.NamedSharding for arrays with the batch, got {sharding}. Write split=False, or "
                "place them with a NamedSharding"
            )
        names = names_in(sharding.spec[axis]) if axis < len(sharding.spec) else ()
        names = tuple(one for one in names if sharding.mesh.shape[one] > 1)
        if names:
            found.add(Devices(sharding.mesh, names))
    if len({one.axes for one in found}) > 1:
        first, other, *_ = sorted(found, key=lambda one: one.axes)
        raise NotDivisible(
            f"expected all arrays with the batch to be divided over the same axes, got {first.axes} for some and "
            f"{other.axes} for others. Write split=False, or place them alike"
        )
    return next(iter(found), None)
