"""Time of a kernel on a target: the larger of its arithmetic and its traffic, and never less than a kernel's start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# What GPU kernels reach of the peak rates. These shares, `KERNEL_SECONDS` and the two rules below come nearest to the
# steps that ran on an H200, relative to their plain steps (docs/measured.md, "Kernels").
TRAFFIC_SHARE = 0.9
PRODUCT_SHARE = 0.6
LONG_PRODUCT_SHARE = 0.3  # of that: gradients of weights, whose operands are read across their rows
TILE = 128 * 128, 256  # numbers of a result, and how many terms of each, that one multiprocessor sums at a time


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device can do.

    Attributes:
        bandwidth: bytes per second between memory and arithmetic.
        flops: FLOP/s of matrix work by dtype name.
        counts_flops: a graph's kernels take the time of their FLOPs, as float32's matrix work, and traffic takes none.
        host_bandwidth: bytes per second each way to the host's memory; None where no value may go there.
        kernel_seconds: the least that a kernel takes.
        multiprocessors: of a GPU; 0 for devices whose kernels are taken to reach the peak rates.
    """

    bandwidth: float
    flops: Mapping[str, float]
    counts_flops: bool = False
    host_bandwidth: float | None = None
    kernel_seconds: float = 0.0
    multiprocessors: int = 0

    def matrix_rate(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`; float32's where the device says nothing of it."""
        share = PRODUCT_SHARE if self.multiprocessors else 1.0
        return share * self.flops.get(dtype, self.flops["float32"])


def product_seconds(flops: float, numbers: int, dtype: str, rates: Rates) -> float:
    """Seconds of the arithmetic of a product or convolution.

    Args:
        flops: floating point operations.
        numbers: how many numbers its result has.
        dtype: name of the result's dtype.
        rates: the device.
    """
    seconds = flops / rates.matrix_rate(dtype)
    if not rates.multiprocessors or not numbers:
        return seconds
    length = flops / (2 * numbers)  # of the sum that each number is
    of_result, of_sums = numbers / TILE[0], length / TILE[1]
    busy = min(1.0, of_result * max(1.0, of_sums) / rates.multiprocessors)
    is_long = length**2 > 4 * numbers  # twice as long as the result is wide
    return seconds / busy / (LONG_PRODUCT_SHARE if is_long else 1.0)


def kernel_seconds(arithmetic: float, moved: float, rates: Rates) -> float:
    """Seconds of a kernel.

    Args:
        arithmetic: seconds that its arithmetic takes; that of elementwise work is bound by traffic.
        moved: bytes that it reads and writes.
        rates: the device.
    """
    share = TRAFFIC_SHARE if rates.multiprocessors else 1.0
    return max(arithmetic, moved / (share * rates.bandwidth), rates.kernel_seconds)
