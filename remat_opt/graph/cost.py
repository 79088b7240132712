"""Time of one op on a target, by a roofline: the larger of its arithmetic and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device can do.

    Attributes:
        bandwidth: bytes per second between memory and arithmetic.
        flops: FLOP/s of matrix work by dtype name.
        counts_flops: a graph's kernels take the time of their FLOPs, as float32's matrix work, and traffic takes none.
        host_bandwidth: bytes per second each way to the host's memory; None where no value may go there.
    """

    bandwidth: float
    flops: Mapping[str, float]
    counts_flops: bool = False
    host_bandwidth: float | None = None

    def matrix_rate(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`; float32's where the device says nothing of it."""
        return self.flops.get(dtype, self.flops["float32"])


def roofline(flops: float, moved: float, dtype: str, rates: Rates, *, matrix: bool) -> float:
    """Seconds of one op.

    Args:
        flops: floating point operations.
        moved: bytes read and written.
        dtype: name of the result's dtype.
        rates: the device.
        matrix: whether the op is a product, for which the matrix units' rate holds; other work is bound by traffic.
    """
    arithmetic = flops / rates.matrix_rate(dtype) if matrix else 0.0
    return max(arithmetic, moved / rates.bandwidth)
