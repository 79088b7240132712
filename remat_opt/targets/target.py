"""`Target`: a device and the compiler for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        devices: of how many the programs are that are compiled for it; more than one for a topology ("v5e:4x4") and for
            nodes of GPUs ("h200:8").
        nodes: of how many computers the GPUs are, the same number in each.
        compiler_config: how to ask for its compiler when it is absent: XLA's GpuTargetConfigProto in text form for
            "cuda" (`gpu_config` writes it); for "tpu" the topology's name, and after commas what else libtpu is told,
            as "v4:2x2x1,chip_config_name=megacore"; empty where it can only be compiled for when attached.
        kernel_seconds: the least that a kernel takes.
        multiprocessors: of a GPU, whose kernels are then timed as those of an H200 were; 0 for other devices.
        counts_flops: whether a search is to make FLOPs least, as papers count them, instead of estimated seconds: times
            are then those of a device that moves bytes for nothing and computes everything at float32's rate. Write
            `dataclasses.replace(resolve_target("h200"), counts_flops=True)`.
        on_chip_bytes: of a TPU, what its vector memory holds of a program's arrays (XLA's memory space assignment).
        host_bandwidth: bytes per second each way between the device and its host's memory; None where it is not known.
        devices_per_chip: of a TPU, how many devices JAX counts for each chip of a topology.
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
    nodes: int = 1
    kernel_seconds: float = 0.0
    multiprocessors: int = 0
    counts_flops: bool = False
    on_chip_bytes: int = 0
    host_bandwidth: float | None = None
    devices_per_chip: int = 1

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
