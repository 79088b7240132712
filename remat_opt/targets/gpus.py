"""The GPUs in the table of devices, and how XLA is asked to compile for a GPU that is absent.

Rates are dense (half of those with sparsity) and sum in float32, as XLA asks for. Multiprocessors, clocks and caches
are those of NVIDIA's architecture whitepapers, or of XLA's own configurations (xla/backends/gpu/target_config/specs);
memory is what the CUDA driver reports, a little less than what is printed on the board.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_opt.targets.target import Target

# The least that a kernel takes, from the steps that ran on an H200 (docs/measured.md, "Kernels").
KERNEL_SECONDS = 2e-6
_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_TERA = 10**12

# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability": what is the same for all …
_OF_ALL = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * _KIB,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
# … and of each capability the threads and the KiB of shared memory of a multiprocessor, the KiB of it that a block may
# have, and (table "Throughput of Native Arithmetic Instructions") the float32 units.
_OF_CAPABILITY = {
    "7.5": (1024, 64, 64, 64),
    "8.0": (2048, 164, 163, 64),
    "8.6": (1536, 100, 99, 128),
    "8.9": (1536, 100, 99, 128),
    "9.0": (2048, 228, 227, 128),
    "10.0": (2048, 228, 227, 128),
    "12.0": (1536, 100, 99, 128),
}
_CUDNN_VERSION = {"major": 9, "minor": 10, "patch": 0}


def gpu_config(
    name: str,
    *,
    capability: str,
    multiprocessors: int,
    clock_ghz: float,
    l2_bytes: int,
    memory_bytes: int,
    bandwidth: float,
) -> str:
    """The `compiler_config` of an NVIDIA GPU's `Target`: XLA's GpuTargetConfigProto in text form.

    Args:
        name: what the attached device calls itself, as "NVIDIA H100 PCIe".
        capability: its compute capability, as "9.0".
        multiprocessors: how many streaming multiprocessors it has.
        clock_ghz: their highest clock.
        l2_bytes: size of its L2 cache.
        memory_bytes: size of its memory.
        bandwidth: peak memory bandwidth in bytes per second.

    Raises:
        ValueError: a compute capability that is not in the table.
    """
    if capability not in _OF_CAPABILITY:
        raise ValueError(f"expected a compute capability among {', '.join(_OF_CAPABILITY)}; got {capability!r}")
    threads, shared, shared_by_block, units = _OF_CAPABILITY[capability]
    major, minor = map(int, capability.split("."))
    device = {
        **_OF_ALL,
        "threads_per_core_limit": threads,
        "shared_memory_per_core": shared * _KIB,
        "shared_memory_per_block_optin": shared_by_block * _KIB,
        "fpus_per_core": units,
        "core_count": multiprocessors,
        "l2_cache_size": l2_bytes,
        "clock_rate_ghz": clock_ghz,
        "cuda_compute_capability": {"major": major, "minor": minor},
        "memory_bandwidth": int(bandwidth),
        "device_memory_size": memory_bytes,
    }
    config = {
        "gpu_device_info": device,
        "platform_name": "CUDA",
        "dnn_version_info": _CUDNN_VERSION,
        "device_description_str": name,
    }
    return _text_proto(config)


def _text_proto(fields: Mapping[str, Any], indent: str = "") -> str:
    """Protocol buffer text format of nested fields."""
    lines = []
    for key, value in fields.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key} {{", _text_proto(value, indent + "  "), f"{indent}}}"]
        else:
            lines.append(f'{indent}{key}: "{value}"' if isinstance(value, str) else f"{indent}{key}: {value}")
    return "\n".join(lines)


def _rates(
    bfloat16: float, float32: float, float64: float, int8: float, float8: float = 0.0, float16: float = 0.0
) -> dict[str, float]:
    """FLOP/s by dtype, from figures in TFLOP/s; `float8` 0 where the device has no such units."""
    rates = {"bfloat16": bfloat16, "float16": float16 or bfloat16, "float32": float32, "float64": float64, "int8": int8}
    if float8:
        rates |= {"float8_e4m3fn": float8, "float8_e5m2": float8}
    return {dtype: rate * _TERA for dtype, rate in rates.items()}


def _gpu(
    name: str,
    kind: str,
    capability: str,
    multiprocessors: int,
    clock_ghz: float,
    l2_mib: float,
    memory_bytes: int,
    bandwidth: float,
    rates: Mapping[str, float],
    host_bandwidth: float,
    *other_kinds: str,
) -> Target:
    """A GPU's target; `kind` and `other_kinds` are what attached ones call themselves."""
    config = gpu_config(
        kind,
        capability=capability,
        multiprocessors=multiprocessors,
        clock_ghz=clock_ghz,
        l2_bytes=int(l2_mib * _MIB),
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
    )
    return Target(
        name,
        "cuda",
        memory_bytes,
        float(bandwidth),
        rates,
        kind,
        (kind, *other_kinds),
        config,
        kernel_seconds=KERNEL_SECONDS,
        multiprocessors=multiprocessors,
        host_bandwidth=host_bandwidth,
    )


# Copies between pinned host memory and the device reach about 80 % of what the bus carries one way (PCI Express 5.0,
# 4.0 and 3.0 with 16 lanes: 63, 31.5 and 15.8 GB/s).
_PCIE_5, _PCIE_4, _PCIE_3 = 55e9, 25e9, 12e9
# NVLink-C2C between Grace and its GPU, as measured. Of GH200 the slower way (to the host; 410 GB/s back).
_GH200_HOST, _GB200_HOST = 170e9, 350e9

# NVIDIA H100 datasheet (SXM): 3.35 TB/s; TFLOP/s with sparsity 1979 (bfloat16), 989 (TF32), 3958 (int8, float8), and 67
# (float64 on tensor cores). H200 datasheet: the same rates, 4.8 TB/s. GH200 datasheet: the same rates, 4 TB/s (96 GB).
_HOPPER = _rates(bfloat16=989.5, float32=494.5, float64=67.0, int8=1979.0, float8=1979.0)
# NVIDIA A100 80GB SXM datasheet: 2039 GB/s.
_A100 = _rates(bfloat16=312.0, float32=156.0, float64=19.5, int8=624.0)
# NVIDIA Blackwell Architecture Technical Brief, HGX B200 and GB200 (at 1000 and 1200 W): 8 TB/s.
_B200 = _rates(bfloat16=2250.0, float32=1100.0, float64=40.0, int8=4500.0, float8=4500.0)
_GB200 = _rates(bfloat16=2500.0, float32=1250.0, float64=45.0, int8=5000.0, float8=5000.0)
# NVIDIA L40S datasheet: 864 GB/s. NVIDIA L4 datasheet (with sparsity 242, 120, 485 and 485 TFLOP/s): 300 GB/s.
_L40S = _rates(bfloat16=362.05, float32=183.0, float64=1.43, int8=733.0, float8=733.0)
_L4 = _rates(bfloat16=121.0, float32=60.0, float64=0.47, int8=242.5, float8=242.5)
# NVIDIA A10G datasheet (AWS): 600 GB/s.
_A10G = _rates(bfloat16=70.0, float32=35.0, float64=0.55, int8=140.0)
# NVIDIA T4 datasheet: 320 GB/s; its tensor cores have float16 and int8, all else runs at float32's rate.
_T4 = _rates(bfloat16=8.1, float16=65.0, float32=8.1, float64=0.25, int8=130.0)
# Whitepapers "NVIDIA Ada GPU Architecture" (RTX 4090: 1008 GB/s) and "NVIDIA RTX Blackwell GPU Architecture" (RTX 5090:
# 1792 GB/s), sums in float32.
_RTX_4090 = _rates(bfloat16=165.2, float32=82.6, float64=1.29, int8=660.6, float8=330.3)
_RTX_5090 = _rates(bfloat16=209.5, float32=104.8, float64=1.64, int8=838.0, float8=419.0)

# Name, what it calls itself, compute capability, multiprocessors, GHz, MiB of L2, bytes, bytes/s, FLOP/s, bytes/s to
# the host.
GPUS = (
    _gpu(
        "h200",
        "NVIDIA H200 141GB HBM3e",
        "9.0",
        132,
        1.98,
        50,
        151_397_597_184,
        4_800e9,
        _HOPPER,
        _PCIE_5,
        "NVIDIA H200",
    ),
    _gpu("h100", "NVIDIA H100 80GB HBM3", "9.0", 132, 1.98, 50, 84_942_979_072, 3_352.32e9, _HOPPER, _PCIE_5),
    _gpu("gh200", "NVIDIA GH200 480GB", "9.0", 132, 1.98, 50, int(94.5 * _GIB), 4_000e9, _HOPPER, _GH200_HOST),
    _gpu("b200", "NVIDIA B200", "10.0", 148, 1.965, 126.5, 191_514_411_008, 7_672.32e9, _B200, _PCIE_5),
    _gpu("gb200", "NVIDIA GB200", "10.0", 152, 2.062, 129.25, 197_897_748_480, 7_928.064e9, _GB200, _GB200_HOST),
    _gpu("a100", "NVIDIA A100-SXM4-80GB", "8.0", 108, 1.41, 40, 85_100_068_864, 2_039.04e9, _A100, _PCIE_4),
    _gpu("l40s", "NVIDIA L40S", "8.9", 142, 2.52, 96, 45_589 * _MIB, 864e9, _L40S, _PCIE_4),
    _gpu("l4", "NVIDIA L4", "8.9", 58, 2.04, 48, 22_558 * _MIB, 300e9, _L4, _PCIE_4),
    _gpu("a10g", "NVIDIA A10G", "8.6", 80, 1.71, 6, 22_587 * _MIB, 600e9, _A10G, _PCIE_4),
    _gpu("t4", "Tesla T4", "7.5", 40, 1.59, 4, 14_930 * _MIB, 320e9, _T4, _PCIE_3),
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090", "8.9", 128, 2.52, 72, 24_207 * _MIB, 1_008e9, _RTX_4090, _PCIE_4),
    _gpu("rtx5090", "NVIDIA GeForce RTX 5090", "12.0", 170, 2.407, 96, 32_112 * _MIB, 1_792e9, _RTX_5090, _PCIE_5),
)
