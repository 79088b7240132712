"""Bytes of an array as a TPU stores it.

Arrays are stored in tiles of 128 lanes by 8 sublanes, however many bytes an element has (`bf16[17,32]` with the layout
`T(8,128)(2,1)` takes 24 × 128 × 2); the two dimensions that lie in them are padded to multiples. The compiler chooses
the dimensions: of an image's array batch and features, of any other those that pad least. (A batch that fills no tile
lies as any other array.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

LANES, SUBLANES = 128, 8


def padded_bytes(shape: Sequence[int], item: int, *, is_image: bool = False) -> int:
    """Bytes of an array in tiles.

    Args:
        shape: its dimensions; of an image (batch, space, features).
        item: bytes of one element.
        is_image: whether a convolution makes or reads it.
    """
    count = math.prod(shape)
    if not count:
        return 0
    if len(shape) < 2:
        return item * -(-count // LANES) * LANES
    last = len(shape) - 1
    pairs = itertools.permutations(range(len(shape)), 2)
    if is_image and last > 1 and shape[0] >= SUBLANES:
        by_batch = _tiled_bytes(shape, item, 0, last, max(_few(shape[last]), 4 // item))
        return min(by_batch, _tiled_bytes(shape, item, last, 0))
    return min(_tiled_bytes(shape, item, *pair) for pair in pairs)


def _few(rows: int) -> int:
    """Rows of a tile that has no more than are needed."""
    return min(SUBLANES, 1 << (rows - 1).bit_length())


def _tiled_bytes(shape: Sequence[int], item: int, lanes: int, sublanes: int, rows: int = SUBLANES) -> int:
    """With one dimension in the lanes and one in the sublanes, of which a tile has some rows."""
    others = math.prod(shape) // (shape[lanes] * shape[sublanes])
    return item * others * _up(shape[lanes], LANES) * _up(shape[sublanes], rows)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
