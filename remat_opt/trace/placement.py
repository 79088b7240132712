"""Where a traced function's arrays are: shardings of its arguments and results, the device it is lowered for."""

from __future__ import annotations

from typing import Any

import jax

from remat_opt.trace import compat


def flat_shardings(traced: Any) -> tuple[list[Any], list[Any]]:
    """Shardings of a traced function's flat arguments and results: those of its jit, else of the arguments; None where
    it was left to the compiler, and for what is on one device."""

    def known(sharding: Any) -> Any:
        left = sharding is None or compat.is_unspecified(sharding) or sharding.num_devices == 1
        return None if left else sharding

    given = [known(one) for one in traced._params["in_shardings"]]
    own = [known(argument.sharding) for argument in traced._meta_tys_flat]
    own = [None] * (len(given) - len(own)) + own  # what a function closes over leads its inputs
    inputs = [own[at] if one is None else one for at, one in enumerate(given)]
    return inputs, [known(one) for one in traced._params["out_shardings"]]


def device_lowered_for(traced: Any) -> Any | None:
    """The first device that a traced function is lowered for, attached or absent; None where only an `AbstractMesh`
    without a device is known. As JAX decides: shardings come first, then the mesh in context, then the default device.
    """
    params = traced._params
    inside = [sharding for sharding, _ in compat.intermediate_shardings(compat.bare_jaxpr(traced.jaxpr))]
    arguments = [one.sharding for one in traced._meta_tys_flat if one.committed and one.sharding is not None]
    placed = [*params["in_shardings"], *arguments, *params["out_shardings"], *inside, params["ctx_mesh"]]
    found = [device for one in placed if not compat.is_unspecified(one) for device in _first_device(one)]
    if found:
        return min(found, key=lambda device: not hasattr(device, "id"))  # a real one before an AbstractDevice or None
    default = getattr(jax.config, "jax_default_device", None)
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def _first_device(placed: Any) -> list[Any]:
    """The first device of a sharding or a mesh; none of an empty mesh."""
    mesh = getattr(placed, "mesh", placed)
    if getattr(mesh, "empty", False):
        return []
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return [mesh.abstract_device]
    return [mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else next(iter(placed.device_set))]
