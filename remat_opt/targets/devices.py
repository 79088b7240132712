"""The devices that programs are planned and compiled for, with their datasheet figures.

`flops` holds the peak rate of dense matrix work with operands of a dtype under JAX's default precision: float32
operands go through TF32 on NVIDIA's tensor cores and through bfloat16 on a TPU's matrix units.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

# Of 0, 2.5 and 5 µs the last gives the times nearest to those of the steps that ran on an H200, relative to each other
# (docs/measured.md, "Kernel starts").
_KERNEL_SECONDS = 5e-6
_TOPOLOGY = re.compile(r"\d+x\d+(x\d+)?")
_GIB = 2**30
_TERA = 10**12


@dataclass(frozen=True)
class Target:
    """A device and the compiler for it.

    Attributes:
        name: what the user writes, as "h200".
        platform: "cpu", "cuda" or "tpu"; of other attached devices what JAX calls their platform.
        memory_bytes: memory of one device in bytes; None where it is the host's own.
        bandwidth: peak memory bandwidth in bytes per second.
        flops: dtype name → peak dense FLOP/s of matrix work with operands of that dtype.
        description: the device in words, with what is nominal about its figures.
        device_kinds: what JAX calls this device where it is attached (`jax.Device.device_kind`).
        devices: of how many the programs are that are compiled for it; more than one for a topology ("v5e:4x4").
        compiler_config: how to ask for its compiler when it is absent: XLA's GpuTargetConfigProto in text form for
            "cuda", the topology's name for "tpu"; empty where it can only be compiled for when attached.
        kernel_seconds: that the start of a kernel takes.
        counts_flops: whether a search is to make FLOPs least, as papers count them, instead of estimated seconds: times
            are then those of a device that moves bytes for nothing and computes everything at float32's rate. Write
            `dataclasses.replace(resolve_target("h200"), counts_flops=True)`.
        on_chip_bytes: of a TPU, what its vector memory holds of a program's arrays (XLA's memory space assignment).
        host_bandwidth: bytes per second each way between the device and its host's memory; None where it is not known.
    """

    name: str
    platform: str
    memory_bytes: int | None
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    description: str
    device_kinds: tuple[str, ...] = ()
    compiler_config: str = field(default="", repr=False)
    devices: int = 1
    kernel_seconds: float = 0.0
    counts_flops: bool = False
    on_chip_bytes: int = 0
    host_bandwidth: float | None = None

    def xla_limit(self, argument_and_result_bytes: int) -> int | None:
        """Bytes of temporary memory above which XLA's GPU compiler recomputes on its own (its pass
        hlo-rematerialization); None where that is not known.

        The compiler takes 80 % of the device's memory for what there is, and 95 % of what arguments and results leave
        of that (its flag `xla_gpu_memory_limit_slop_factor`).

        Args:
            argument_and_result_bytes: bytes of all arguments and results, aliased ones once.
        """
        if self.platform != "cuda" or self.memory_bytes is None:
            return None
        return max(0, int(0.95 * (0.8 * self.memory_bytes - argument_and_result_bytes)))


# Fields of XLA's GpuTargetConfigProto that are the same for the three GPUs: CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability" (8.0 and 9.0).
_GPU_FIELDS_IN_COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
# 228 KiB and 164 KiB of shared memory per multiprocessor, 1 KiB of it the system's; 132 and 108 multiprocessors; 128
# and 64 float32 units in each: the architecture whitepapers "NVIDIA H100" and "NVIDIA A100".
_HOPPER_FIELDS = {
    "shared_memory_per_core": 228 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "core_count": 132,
    "fpus_per_core": 128,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "cuda_compute_capability": {"major": 9},
}
_AMPERE_FIELDS = {
    "shared_memory_per_core": 164 * 1024,
    "shared_memory_per_block_optin": 163 * 1024,
    "core_count": 108,
    "fpus_per_core": 64,
    "l2_cache_size": 40 * 2**20,
    "clock_rate_ghz": 1.41,
    "cuda_compute_capability": {"major": 8},
}
_CUDNN_VERSION = {"major": 9, "minor": 10, "patch": 0}


def _text_proto(fields: Mapping[str, Any], indent: str = "") -> str:
    """Protocol buffer text format of nested fields."""
    lines = []
    for key, value in fields.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key} {{", _text_proto(value, indent + "  "), f"{indent}}}"]
        else:
            lines.append(f'{indent}{key}: "{value}"' if isinstance(value, str) else f"{indent}{key}: {value}")
    return "\n".join(lines)


def _gpu(
    name: str,
    description: str,
    memory_bytes: int,
    bandwidth: int,
    flops: dict[str, float],
    fields: dict[str, Any],
    host_bandwidth: float,
) -> Target:
    """A GPU's target; `description` is also the name that JAX gives to the attached device."""
    device = {
        **_GPU_FIELDS_IN_COMMON,
        **fields,
        "memory_bandwidth": bandwidth,
        "device_memory_size": memory_bytes,
    }
    config = {
        "gpu_device_info": device,
        "platform_name": "CUDA",
        "dnn_version_info": _CUDNN_VERSION,
        "device_description_str": description,
    }
    # An attached H200 calls itself "NVIDIA H200".
    kinds = (description, "NVIDIA H200") if name == "h200" else (description,)
    return Target(
        name,
        "cuda",
        memory_bytes,
        float(bandwidth),
        flops,
        description,
        kinds,
        _text_proto(config),
        kernel_seconds=_KERNEL_SECONDS,
        host_bandwidth=host_bandwidth,
    )


def _tpu(
    name: str, topology: str, memory_gib: int, vector_memory_mib: int, bandwidth: float, bfloat16: float, kinds: tuple
) -> Target:
    """A TPU chip's target; int8 runs at twice the rate of bfloat16, float32 operands are rounded to bfloat16."""
    flops = {"bfloat16": bfloat16, "float16": bfloat16, "float32": bfloat16, "int8": 2 * bfloat16}
    description = f"one chip of Cloud TPU {name}"
    on_chip = (vector_memory_mib - 16) * 2**20  # 16 MiB are the kernels' own scratch (`xla_tpu_scoped_vmem_limit_kib`)
    return Target(
        name,
        "tpu",
        memory_gib * _GIB,
        bandwidth,
        flops,
        description,
        kinds,
        topology,
        kernel_seconds=_KERNEL_SECONDS,
        on_chip_bytes=on_chip,
    )


# Dense rates (half of those with sparsity) of the SXM boards. NVIDIA H100 datasheet: 3.35 TB/s; 1979/2 (bfloat16),
# 989/2 (TF32), 67 (float64 on tensor cores), 3958/2 (int8, float8) TFLOP/s. H200 datasheet: the same rates, 4.8 TB/s.
_HOPPER_FLOPS = {
    "bfloat16": 989.5 * _TERA,
    "float16": 989.5 * _TERA,
    "float32": 494.5 * _TERA,
    "float64": 67.0 * _TERA,
    "int8": 1979.0 * _TERA,
    "float8_e4m3fn": 1979.0 * _TERA,
    "float8_e5m2": 1979.0 * _TERA,
}
# NVIDIA A100 80GB SXM datasheet: 2039 GB/s; 312 (bfloat16), 156 (TF32), 19.5 (float64), 624 (int8).
_AMPERE_FLOPS = {
    "bfloat16": 312.0 * _TERA,
    "float16": 312.0 * _TERA,
    "float32": 156.0 * _TERA,
    "float64": 19.5 * _TERA,
    "int8": 624.0 * _TERA,
}
# Copies between pinned host memory and the device reach about 80 % of what the bus carries one way (PCI Express 5.0 and
# 4.0 with 16 lanes: 63 and 31.5 GB/s).
_PCIE_5, _PCIE_4 = 55e9, 25e9
# Nominal: 16 cores with AVX2 at 2 GHz, and six channels of DDR4. A plan needs their ratio, and must not
# depend on the host that makes it, so these are constants.
_CPU_FLOPS = {"bfloat16": 1.0 * _TERA, "float16": 1.0 * _TERA, "float32": 1.0 * _TERA, "float64": 0.5 * _TERA}

# TPUs: https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e, "System architecture", figures per chip;
# vector memory: `pltpu.get_tpu_info`.
_TARGETS = (
    Target("cpu", "cpu", None, 100e9, _CPU_FLOPS, "the host's CPU; rates are nominal, memory is the host's", ("cpu",)),
    _gpu("h200", "NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800 * 10**9, _HOPPER_FLOPS, _HOPPER_FIELDS, _PCIE_5),
    _gpu("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320 * 10**6, _HOPPER_FLOPS, _HOPPER_FIELDS, _PCIE_5),
    _gpu("a100", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040 * 10**6, _AMPERE_FLOPS, _AMPERE_FIELDS, _PCIE_4),
    _tpu("v5e", "v5e:2x2", 16, 128, 819e9, 197.0 * _TERA, ("TPU v5 lite", "TPU v5e")),
    _tpu("v5p", "v5p:2x2x1", 95, 64, 2765e9, 459.0 * _TERA, ("TPU v5", "TPU v5p")),
    _tpu("v6e", "v6e:2x2", 32, 128, 1640e9, 918.0 * _TERA, ("TPU v6 lite", "TPU v6e")),
)
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _TARGETS})

# The rates of a device that is attached but not in the table.
_STAND_INS = {"cuda": "a100", "rocm": "a100", "gpu": "a100", "tpu": "v5e"}


def resolve_target(target: str | Target | None) -> Target:
    """The target of that name; a `Target` is handed back; None is the attached backend.

    The name of a TPU may be followed by a topology, as in "v5e:4x4": programs are then compiled for all of its chips.

    Raises:
        ValueError: no target has this name; the message lists those there are.
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
    name, _, topology = target.partition(":")
    if name in TARGETS and TARGETS[name].platform == "tpu" and _TOPOLOGY.fullmatch(topology):
        devices = math.prod(map(int, topology.split("x")))
        of = f"{devices} chips of Cloud TPU {name}, {topology}"
        return dataclasses.replace(
            TARGETS[name], name=target, description=of, device_kinds=(), compiler_config=target, devices=devices
        )
    raise ValueError(
        f'unknown target {target!r}; expected one of {", ".join(TARGETS)}, a TPU with its topology ("v5e:4x4"), '
        "a remat_opt.targets.Target, or None for the attached backend"
    )


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
