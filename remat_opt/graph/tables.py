"""What tables of numbers are asked, in few passes over them."""

from __future__ import annotations

import numpy as np


def min_along(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least numbers along the first axis, and where the first of each stands.

    NumPy's `argmin` and `argmax` turn the table so that the axis is the last one; the largest of small numbers that
    fall along the axis tells the same in a tenth of the time.
    """
    count, least = len(table), table.min(axis=0)
    falling = np.arange(count, 0, -1, dtype=np.min_scalar_type(count)).reshape(-1, *[1] * least.ndim)
    return least, count - ((table == least) * falling).max(axis=0)
