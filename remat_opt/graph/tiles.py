"""Bytes of an array as a TPU stores it.

Arrays are stored in tiles of 128 lanes by 8 sublanes, however many bytes an element has (`bf16[17,32]` with the layout
`T(8,128)(2,1)` takes 24 × 128 × 2); the two dimensions that lie in them are padded to multiples. The compiler chooses
the dimensions: of an image's array batch and features, of any other those that pad least. (A batch that fills no tile
lies as any other array, or in parts: `compilers/tpu_parts.py`.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

LANES, SUBLANES = 128, 8


def padded_bytes(
    shape: Sequence[int], item: int, *, is_image: bool = False, with_batch_in_lanes: bool = False, batch: int = 0
) -> int:
    """Bytes of an array in tiles.

    Args:
        shape: its dimensions; of an image (batch, space, features).
        item: bytes of one element.
        is_image: whether a convolution makes or reads it.
        with_batch_in_lanes: of an image, that the compiler has no choice.
        batch: of an image, which dimension numbers the examples.
    """
    count = math.prod(shape)
    if not count:
        return 0
    if len(shape) < 2:
        return item * -(-count // LANES) * LANES
    last = len(shape) - 1
    pairs = itertools.permutations(range(len(shape)), 2)
    if is_image and last > 1 and shape[batch] >= SUBLANES:
        by_batch = _tiled_bytes(shape, item, batch, last, max(_few(shape[last]), 4 // item))
        return by_batch if with_batch_in_lanes else min(by_batch, _tiled_bytes(shape, item, last, batch))
    return min(_tiled_bytes(shape, item, *pair) for pair in pairs)


def bytes_with_first_in_lanes(shape: Sequence[int], item: int) -> int:
    """Bytes of an array that pads least with its first dimension in the lanes; 0 where another one does as well."""
    if len(shape) < 3:
        return 0
    last = range(len(shape))
    first = min(_tiled_bytes(shape, item, 0, sublanes) for sublanes in last[1:])
    others = min(_tiled_bytes(shape, item, *pair) for pair in itertools.permutations(last, 2) if pair[0])
    return first if first < others else 0


def lies_turned(shape: Sequence[int], item: int) -> bool:
    """Whether a matrix takes less with its rows in the lanes, as it is given to a step then."""
    return _tiled_bytes(shape, item, 0, 1) < _tiled_bytes(shape, item, 1, 0)


def padded_rows(shape: Sequence[int], item: int, count: int) -> int:
    """Bytes of an array of which each row is in tiles of its own, or is in their lanes if it has one dimension.

    Args:
        shape: its dimensions, of which the first `count` number the rows.
        item: bytes of one element.
        count: of dimensions.
    """
    rows, row = math.prod(shape[:count]), [size for size in shape[count:] if size != 1]
    if not rows or not row:
        return padded_bytes((rows * math.prod(row),), item)
    if len(row) == 1:
        return _tiled_bytes((rows, *row), item, 1, 0)
    pairs = itertools.permutations(range(len(row)), 2)
    return rows * min(_tiled_bytes(row, item, lanes, few, _few(row[few])) for lanes, few in pairs)


def bytes_with_lanes(shape: Sequence[int], item: int, lanes: int, sublanes: int | None = None) -> int:
    """Bytes of an array of which one dimension is known to be in the lanes, and maybe one in the sublanes."""
    if sublanes is not None:
        return _tiled_bytes(shape, item, lanes, sublanes)
    others = [at for at in range(len(shape)) if at != lanes]
    if not others:
        return padded_bytes(shape, item)
    return min(_tiled_bytes(shape, item, lanes, sublanes) for sublanes in others)


def elements_by_rows(shape: Sequence[int]) -> int:
    """Elements of an array that lies row by row, its last dimension in the lanes, with those that fill up its tiles."""
    shape = [size for size in shape if size != 1]
    if len(shape) < 2:
        return math.prod(shape)
    return _tiled_bytes(shape, 4, len(shape) - 1, len(shape) - 2) // 4


def has_batch_in_lanes(shape: Sequence[int], item: int) -> bool:
    """Whether an image pads less with the batch in the lanes than with the features there; arguments as above."""
    last = len(shape) - 1
    return _tiled_bytes(shape, item, 0, last) < _tiled_bytes(shape, item, last, 0)


def lies_otherwise(shape: Sequence[int], item: int) -> bool:
    """Whether an image that pads as little as it can has in the lanes neither its batch nor its features, of which
    convolutions want one there; arguments as above."""
    last = len(shape) - 1
    lanes = 0 if has_batch_in_lanes(shape, item) else last
    so = min(_tiled_bytes(shape, item, lanes, sublanes) for sublanes in range(len(shape)) if sublanes != lanes)
    return so > padded_bytes(shape, item)


def bytes_before_merging(shape: Sequence[int], item: int) -> int:
    """Bytes of images of which two and more leading dimensions number the examples, as they lie where these are to
    become one in the lanes: the last two of them in the tiles. 0 where image rows and columns pad less there.

    Args:
        shape: its dimensions, the last three of them those of one image.
        item: bytes of one element.
    """
    rank = len(shape)
    merged = _tiled_bytes(shape, item, rank - 4, rank - 5)
    return merged if merged <= _tiled_bytes(shape, item, rank - 2, rank - 3) else 0


def bytes_with_features_or_batch_in_lanes(shape: Sequence[int], item: int, batch: int, features: int) -> int:
    """Bytes of an image as convolutions have it, its batch and features in the tiles. Fewer than eight rows are not
    filled up to eight, but to a power of two, or to what takes four bytes."""
    return min(
        _tiled_bytes(shape, item, features, batch, max(_few(shape[batch]), 4 // item)),
        _tiled_bytes(shape, item, batch, features, max(_few(shape[features]), 4 // item)),
    )


def bytes_without_features(shape: Sequence[int], item: int) -> int:
    """Bytes of what is left of images when their features are reduced: the other dimensions lie as in the images, so
    that the batch is in the lanes, or as they pad least where it fills no tile."""
    sizes = [shape[0], *(size for size in shape[1:] if size != 1)]
    if len(sizes) < 3 or shape[0] < SUBLANES:
        return padded_bytes(shape, item)
    return _tiled_bytes(sizes, item, 0, len(sizes) - 1)


def _few(rows: int) -> int:
    """Rows of a tile that has no more than are needed."""
    return min(SUBLANES, 1 << (rows - 1).bit_length())


def _tiled_bytes(shape: Sequence[int], item: int, lanes: int, sublanes: int, rows: int = SUBLANES) -> int:
    """With one dimension in the lanes and one in the sublanes, of which a tile has some rows."""
    others = math.prod(shape) // (shape[lanes] * shape[sublanes])
    return item * others * _up(shape[lanes], LANES) * _up(shape[sublanes], rows)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
