"""The TPUs in the table of devices. Figures are those of one device as JAX counts them: a chip, or one of the two cores
of a chip ("v2", "v3", "tpu7x")."""

from __future__ import annotations

from remat_opt.targets.gpus import KERNEL_SECONDS
from remat_opt.targets.target import Target

_GIB, _MIB = 2**30, 2**20
_TERA = 10**12


def _tpu(
    name: str,
    topology: str,
    memory_gib: int,
    on_chip_mib: int,
    bandwidth: float,
    bfloat16: float,
    int8: float,
    kinds: tuple[str, ...],
    devices_per_chip: int = 1,
) -> Target:
    """The target of a TPU's device, from the figures of its chip in GiB, bytes per second and TFLOP/s.

    Args:
        name: as libtpu calls it.
        topology: the smallest that libtpu takes, with what else it has to be told (see `Target.compiler_config`).
        memory_gib: memory of the chip.
        on_chip_mib: see `Target.on_chip_bytes`; of one device.
        bandwidth: of the chip's memory.
        bfloat16: rate of the chip; float32 operands are rounded to bfloat16.
        int8: rate of the chip; that of bfloat16 where it has none.
        kinds: what JAX calls the attached device.
        devices_per_chip: how many JAX counts.
    """
    rate = bfloat16 * _TERA / devices_per_chip
    flops = {"bfloat16": rate, "float16": rate, "float32": rate, "int8": int8 * _TERA / devices_per_chip}
    return Target(
        name,
        "tpu",
        memory_gib * _GIB // devices_per_chip,
        bandwidth / devices_per_chip,
        flops,
        f"one chip of Cloud TPU {name}" if devices_per_chip == 1 else f"one of the two cores of a chip of TPU {name}",
        kinds,
        topology,
        kernel_seconds=KERNEL_SECONDS,
        on_chip_bytes=on_chip_mib * _MIB,
        devices_per_chip=devices_per_chip,
    )


# https://cloud.google.com/tpu/docs/v2, /v3, /v4, /v5e, /v5p, /v6e and /tpu7x, "System architecture", figures per chip.
# On the chip: vector memory by `pltpu.get_tpu_info`, less the kernels' own scratch of 16 MiB (the compiler's option
# `xla_tpu_scoped_vmem_limit_kib`); of v4 its common memory. The cores of a v4 are one device only if libtpu is told.
TPUS = (
    _tpu("v5e", "v5e:2x2", 16, 112, 819e9, 197.0, 394.0, ("TPU v5 lite", "TPU v5e")),
    _tpu("v5p", "v5p:2x2x1", 95, 48, 2765e9, 459.0, 918.0, ("TPU v5", "TPU v5p")),
    _tpu("v6e", "v6e:2x2", 32, 112, 1640e9, 918.0, 1836.0, ("TPU v6 lite", "TPU v6e")),
    _tpu("tpu7x", "tpu7x:2x2x1", 192, 48, 7380e9, 2307.0, 2307.0, ("TPU7x",), 2),
    _tpu("v4", "v4:2x2x1,chip_config_name=megacore", 32, 128, 1200e9, 275.0, 275.0, ("TPU v4",)),
    _tpu("v3", "v3:2x2", 32, 0, 900e9, 123.0, 123.0, ("TPU v3",), 2),
    _tpu("v2", "v2:2x2", 16, 0, 700e9, 45.0, 45.0, ("TPU v2",), 2),
)
