"""Programs with Pallas kernels.

From jax 0.11 on, Pallas asks at lowering which GPU a kernel is for; here it is the absent target.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from remat_opt.targets.target import Target
from remat_opt.trace import compat
from remat_opt.trace.nested import with_jaxprs
from remat_opt.trace.platforms import GPUS


def for_absent_gpu(closed: Any, target: Target) -> Any:
    """A closed jaxpr whose kernels are lowered for a GPU that is not here; the same object where there are none."""
    if target.platform not in GPUS or not target.device_kinds:
        return closed
    name = min(target.device_kinds, key=len)  # the one that JAX knows
    device = jax.sharding.AbstractDevice(name, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        (traced_there,) = jax.make_jaxpr(jnp.negative)(1.0).jaxpr.eqns

    def placed(jaxpr: Any) -> Any:
        equations, is_changed = [], False
        for equation in jaxpr.eqns:
            changes: dict[str, Any] = {}
            if compat.is_kernel(equation.params):
                changes["ctx"] = traced_there.ctx
            elif (params := with_jaxprs(equation.params, placed)) is not equation.params:
                changes["params"] = params
            equations.append(equation.replace(**changes) if changes else equation)
            is_changed |= bool(changes)
        return jaxpr.replace(eqns=equations) if is_changed else jaxpr

    jaxpr = compat.bare_jaxpr(closed)
    found = placed(jaxpr)
    return closed if found is jaxpr else compat.ClosedJaxpr(found, compat.constants_of(closed))
