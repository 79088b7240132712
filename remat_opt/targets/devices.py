"""The devices that programs are planned and compiled for, with their datasheet figures.

`flops` holds the peak rate of dense matrix work with operands of a dtype under JAX's default precision: float32
operands go through TF32 on NVIDIA's tensor cores and through bfloat16 on a TPU's matrix units.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from remat_opt.targets.gpus import GPUS
from remat_opt.targets.target import Target
from remat_opt.targets.tpus import TPUS

_TOPOLOGY = re.compile(r"\d+x\d+(x\d+)?")
_NODES = re.compile(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})")  # nodes, and GPUs of each
_TERA = 10**12

# Nominal: 16 cores with AVX2 at 2 GHz, and six channels of DDR4. A plan needs their ratio, and must not
# depend on the host that makes it, so these are constants.
_CPU_FLOPS = {"bfloat16": 1.0 * _TERA, "float16": 1.0 * _TERA, "float32": 1.0 * _TERA, "float64": 0.5 * _TERA}

_CPU = Target(
    "cpu", "cpu", None, 100e9, _CPU_FLOPS, "the host's CPU; rates are nominal, memory is the host's", ("cpu",)
)
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in (_CPU, *GPUS, *TPUS)})

# The rates of a device that is attached but not in the table.
_STAND_INS = {"cuda": "a100", "rocm": "a100", "gpu": "a100", "tpu": "v5e"}


def resolve_target(target: str | Target | None) -> Target:
    """The target of that name; a `Target` is handed back; None is the attached backend.

    The name of a TPU may be followed by a topology, as in "v5e:4x4", and that of a GPU by the number of GPUs in a node,
    as in "h200:8", or of nodes and of GPUs in each, as in "h100:2x8": programs are then compiled for all of them.

    Raises:
        ValueError: no target has this name, or what follows it is no topology; the message says what to write.
        TypeError: something else was passed.
    """
    if target is None:
        return attached_target()
    if isinstance(target, Target):
        return target
    if not isinstance(target, str):
        raise TypeError(
            f"target is the name of a device, a remat_opt.targets.Target or None, got {type(target).__name__}; "
            f'write for example target="h200"'
        )
    if target in TARGETS:
        return TARGETS[target]
    name, colon, topology = target.partition(":")
    if colon and name in TARGETS and (several := _SEVERAL.get(TARGETS[name].platform)):
        return several(TARGETS[name], topology)
    alike = difflib.get_close_matches(target.lower(), TARGETS, 1)
    meant = f" (did you mean {alike[0]!r}?)" if alike else ""
    raise ValueError(
        f"unknown target {target!r}{meant}; expected one of {', '.join(TARGETS)}, a GPU with the number of GPUs in a "
        'node ("h200:8"), a TPU with its topology ("v5e:4x4"), a remat_opt.targets.Target, or None for the attached '
        "backend"
    )


def _nodes_of(gpu: Target, topology: str) -> Target:
    """The target of all GPUs in one or several nodes."""
    found = _NODES.fullmatch(topology)
    if not found:
        raise ValueError(
            f'expected a number of GPUs after {gpu.name}, got "{gpu.name}:{topology}". Write "{gpu.name}:8" for one '
            f'node of eight GPUs, "{gpu.name}:2x8" for two such nodes'
        )
    nodes, each = int(found[1] or 1), int(found[2])
    return dataclasses.replace(
        gpu,
        name=f"{gpu.name}:{topology}",
        description=f"{each} × {gpu.description}" + (f" in each of {nodes} nodes" if nodes > 1 else ", one node"),
        device_kinds=(),
        devices=nodes * each,
        nodes=nodes,
    )


def _topology_of(tpu: Target, topology: str) -> Target:
    """The target of all chips of a TPU's topology."""
    if not _TOPOLOGY.fullmatch(topology):
        raise ValueError(
            f'expected a topology after {tpu.name}, got "{tpu.name}:{topology}". Write "{tpu.name}:4x4" for 4 × 4 '
            "chips, with a third number where the chips are in a cube"
        )
    chips = math.prod(map(int, topology.split("x")))
    _, *told = tpu.compiler_config.split(",")
    return dataclasses.replace(
        tpu,
        name=f"{tpu.name}:{topology}",
        description=f"{chips} chips of Cloud TPU {tpu.name}, {topology}",
        device_kinds=(),
        compiler_config=",".join([f"{tpu.name}:{topology}", *told]),
        devices=chips * tpu.devices_per_chip,
    )


_SEVERAL = {"cuda": _nodes_of, "tpu": _topology_of}


def attached_target() -> Target:
    """The target of JAX's default backend."""
    return target_of(jax.devices()[0])


def target_of(device: Any) -> Target:
    """The target of a device of JAX's.

    A device that is not in the table gets a target of its own, with the rates of a similar one, which can be compiled
    for only where it is attached.
    """
    kind = str(device.device_kind)
    for target in TARGETS.values():
        if kind in target.device_kinds:
            return target
    if device.platform == "cpu":
        return TARGETS["cpu"]
    platform = _compiler_platform(device)
    stand_in = TARGETS[_STAND_INS.get(platform, "a100")]
    return Target(
        name="-".join(kind.lower().split()),
        platform=platform,
        memory_bytes=(_memory_stats(device) or {}).get("bytes_limit"),
        bandwidth=stand_in.bandwidth,
        flops=stand_in.flops,
        kernel_seconds=stand_in.kernel_seconds,
        multiprocessors=stand_in.multiprocessors,
        host_bandwidth=stand_in.host_bandwidth,
        description=f"attached {kind}; it is not in the table of targets, so bandwidth and rates are {stand_in.name}'s",
        device_kinds=(kind,),
    )


def _compiler_platform(device: Any) -> str:
    """JAX calls every GPU "gpu"; the compiler's platform is told by the client's version."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _memory_stats(device: Any) -> Mapping[str, int] | None:
    """The allocator's figures, where the backend keeps them."""
    try:
        return device.memory_stats()
    except jax.errors.JaxRuntimeError:
        return None
