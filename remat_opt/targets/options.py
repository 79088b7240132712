"""Compiler options that a rewritten step needs, by platform. They are set on the jit that we make, never globally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_opt.targets.target import Target
from remat_opt.trace import compat
from remat_opt.trace.placement import device_lowered_for
from remat_opt.trace.platforms import GPUS

# The CPU compiler expands optimization barriers and then merges what they kept apart (JAX issue 19822; jax 0.12 keeps
# them, and the option does no harm there). Its default order of instructions favours concurrency, which lets buffers
# live long; the order for little memory is as fast (see the demo's time ratio). Loops over a few hundred bytes it would
# hoist into one kernel each, in which it has no code for a barrier: one of an array is an error there, one of several
# aborts the process.
BARRIERS_KEPT = {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
_CPU = {
    **BARRIERS_KEPT,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
# XLA's own rematerialization counts the host's buffers as the device's without it.
_OFFLOADING_ON_GPUS = {"xla_gpu_enable_host_memory_offloading": True}
_LISTS = frozenset({"xla_disable_hlo_passes"})


def compiler_options_for(
    platform: str, given: Mapping[str, Any] | None = None, *, offloads: bool = False
) -> dict[str, Any]:
    """The options of a platform under those of the user; options that are lists are merged.

    Args:
        platform: of the compiler.
        given: the user's options.
        offloads: whether values may go to the host's memory.
    """
    ours: dict[str, Any] = _CPU if platform == "cpu" else {}
    if offloads and platform in GPUS:
        ours = _OFFLOADING_ON_GPUS
    return merge_compiler_options(ours, given or {})


def merge_compiler_options(given: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """Compiler options under others that override them by name; options that are lists are joined."""
    options = dict(given)
    for name, value in overriding.items():
        if name in _LISTS and name in options:
            options[name] = ",".join(dict.fromkeys([*str(value).split(","), *str(options[name]).split(",")]))
        else:
            options[name] = value
    return options


def platform_of(traced: Any, target: Target) -> str:
    """The platform that a traced function is lowered for: that of its devices, which may be absent.

    Args:
        traced: what `jax.jit(...).trace(...)` returns.
        target: the device that it was planned for, which decides where only an `AbstractMesh` is known.
    """
    device = device_lowered_for(traced)
    return target.platform if device is None else device.platform


def merges_checkpoints(platform: str, compiler_options: Mapping[str, Any] | None) -> bool:
    """Whether a step compiled with these options has what a `jax.checkpoint` recomputes merged with its first run."""
    disabled = str((compiler_options or {}).get("xla_disable_hlo_passes", "")).split(",")
    return compat.expands_barriers(platform) and "cse_barrier_expander" not in disabled
