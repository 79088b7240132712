"""Carry a flat JAX function to another process: export it for a platform that is not attached here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as extend_core

from remat_opt.targets.callbacks import without_callbacks
from remat_opt.targets.errors import ProgramNotPortable, TargetUnavailable
from remat_opt.targets.kernels import for_absent_gpu
from remat_opt.targets.target import Target
from remat_opt.trace.avals import abstract

_WITHOUT_CALLBACKS = (
    "measured with operations of the same operands and results in place of callbacks to the host and debug prints"
)


@dataclass(frozen=True)
class PortableProgram:
    """An exported function, ready to be compiled in another process.

    Attributes:
        serialised: the program, by `jax.export`.
        donated: positions of the arguments whose memory may be reused.
        keep_unused: whether arguments that the program does not read are still its arguments.
        note: what differs from the function as given; empty if nothing.
        mesh: name, size and type ("Auto", "Explicit") of each axis of the mesh that its arrays are divided over; empty
            for one device.
    """

    serialised: bytearray
    donated: tuple[int, ...]
    keep_unused: bool
    note: str
    mesh: tuple[tuple[str, int, str], ...] = ()


def export_flat(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    *,
    target: Target,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
    out_shardings: Sequence[Any] | None = None,
) -> PortableProgram:
    """Export a flat function for a target.

    Args:
        fun: takes arrays by position, returns a list or tuple of arrays.
        avals: a `jax.ShapeDtypeStruct` for each argument. Shardings, over a mesh of as many devices as the target has,
            are kept; the mesh may be an `AbstractMesh`.
        target: what it is to be compiled for.
        donated: positions of the arguments whose memory may be reused.
        keep_unused: as of `jax.jit`.
        out_shardings: one for each result, None where it is left to the compiler; None for none.

    Raises:
        ProgramNotPortable: `jax.export` has no form for it, or it is divided over more or fewer devices than the target
            has.
        TargetUnavailable: the package that serialises programs is not installed.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise TargetUnavailable(
            "compiling for an absent device needs the package flatbuffers, which is not installed; "
            'write: pip install "remat_opt[cuda-aot]" or pip install "remat_opt[tpu-aot]"'
        )
    mesh = _mesh_of([getattr(aval, "sharding", None) for aval in avals], target)
    arguments = [abstract(aval) if mesh is not None else _of_one_device(aval) for aval in avals]
    divided: dict[str, Any] = (
        {"out_shardings": list(out_shardings)} if mesh is not None and out_shardings is not None else {}
    )
    jitted = jax.jit(lambda *values: list(fun(*values)), keep_unused=keep_unused, **divided)
    closed = jitted.trace(*arguments).jaxpr
    portable = without_callbacks(closed)
    note = "" if portable is closed else _WITHOUT_CALLBACKS
    portable = for_absent_gpu(portable, target) if mesh is None else portable
    if portable is not closed:
        jitted = jax.jit(extend_core.jaxpr_as_fun(portable), keep_unused=keep_unused, **divided)
    # The same versions export and compile, so custom calls (Pallas kernels, linear algebra) need no stability promise.
    checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    try:
        exported = jax.export.export(jitted, platforms=(target.platform,), disabled_checks=checks)(*arguments)
        serialised = exported.serialize()
    except (ValueError, NotImplementedError) as error:
        raise ProgramNotPortable(
            f"expected a program that jax.export can carry to the compiler for {target.platform}, got: {error}. "
            "Measure where the device is attached (target=None)"
        ) from error
    return PortableProgram(serialised, tuple(donated), keep_unused, note, () if mesh is None else _axes_of(mesh))


def _mesh_of(shardings: Sequence[Any], target: Target) -> Any | None:
    """The mesh that arguments are divided over; None where all of them are of one device."""
    for position, sharding in enumerate(shardings):
        if sharding is None or sharding.num_devices <= 1:  # 0 on the empty mesh
            continue
        devices = sharding.num_devices
        if devices != target.devices or not isinstance(sharding, jax.sharding.NamedSharding):
            topology = _example(target, devices)
            raise ProgramNotPortable(
                f"expected arguments with NamedShardings over the {target.devices} devices of {target.name}, got "
                f"argument {position} with {sharding}, {devices} devices; pass a mesh (an AbstractMesh will do) of "
                f"{target.devices}, or name another target ({topology})"
            )
        return sharding.mesh
    return None


def _axes_of(mesh: Any) -> tuple[tuple[str, int, str], ...]:
    kinds = (kind.name for kind in mesh.axis_types)
    return tuple(zip(mesh.axis_names, mesh.axis_sizes, kinds, strict=True))


def _example(target: Target, devices: int) -> str:
    """What to write as the target of so many devices."""
    name = target.name.partition(":")[0]
    if target.platform == "cuda":
        return f'"{name}:{devices}" for {devices} GPUs in a node'
    return f'"{name}:4x4" for 4 × 4 chips' if target.platform == "tpu" else "None"


def _of_one_device(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
