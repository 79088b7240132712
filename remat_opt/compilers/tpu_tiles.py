"""How many bytes a TPU's compiler gives each value of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import TYPE_CHECKING

from jax.extend.core import primitives as P

from remat_opt.compilers.tpu_groups import joined_features
from remat_opt.graph.graph import Graph
from remat_opt.graph.tiles import (
    bytes_with_features_or_batch_in_lanes,
    bytes_with_lanes,
    bytes_without_features,
    has_batch_in_lanes,
    padded_bytes,
    padded_rows,
)
from remat_opt.program import compat
from remat_opt.program.images import lying_as, with_split_batch, without_features

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader


def in_tiles(reader: TpuReader, graph: Graph, *, narrow: bool = True) -> Graph:
    """The graph with sizes as a TPU stores them.

    Args:
        graph: of ops or of kernels.
        narrow: whether what only products read takes two bytes an element: not before the kernels are known.
    """
    images, stacks = reader.images, stacks_of_images(reader) | reader.as_stacks
    joined, split = _joined_by_batch(reader, images), with_split_batch(reader.program)
    featureless = without_features(reader.program, images)
    sizes = list(graph.sizes)
    rounded = reader.rounded if narrow else ()
    for value, aval in enumerate(reader.program.avals):
        if not sizes[value]:
            continue
        item = 2 if value in rounded else compat.item_bytes(aval.dtype)
        if value in reader.parts.cut:
            cut = reader.parts.cut[value]
            shape = cut.shape_of(aval.shape)
            sizes[value] = bytes_with_features_or_batch_in_lanes(shape, item, cut.batch, cut.features)
        elif value in reader.grouped.layouts:
            sizes[value] = reader.grouped.bytes_of(value, item)
        elif value in stacks:
            sizes[value] = aval.shape[0] * padded_bytes(aval.shape[1:], item, is_image=True)
        elif value in reader.merged:
            sizes[value] = padded_bytes(reader.merged[value], item, is_image=True)
        elif value in reader.rows.lying and value not in images:
            sizes[value] = padded_rows(aval.shape, item, reader.rows.lying[value])
        elif value in featureless:
            sizes[value] = bytes_without_features(aval.shape, item)
        elif value in reader.groups.lying_as_images:
            sizes[value] = padded_bytes(joined_features(aval.shape), item, is_image=True)
        elif value in reader.for_gradients and value not in images:
            sizes[value] = bytes_with_lanes(aval.shape, item, *reader.for_gradients[value])
        elif value in reader.as_products_read:
            sizes[value] = item * reader.as_products_read[value]
        else:
            is_image, with_batch = value in images, value in joined
            batch = len(aval.shape) - 4 if value in split else 0
            sizes[value] = padded_bytes(
                aval.shape, item, is_image=is_image, with_batch_in_lanes=with_batch, batch=batch
            )
    return dataclasses.replace(graph, sizes=tuple(sizes))


def stacks_of_images(reader: TpuReader) -> frozenset[int]:
    """What loops put together of images of all their turns: they lie one behind the other. (Of what a loop carries
    from turn to turn each lies as the first one does, which it was given.)"""
    found: set[int] = set()
    for equation in reader.program.equations:
        if equation.primitive is P.scan_p:
            _, carries = compat.scan_counts(equation.params)
            images = reader.images_of_bodies.get(id(equation.params["jaxpr"]), ())
            found.update(equation.outputs[at] for at in images if at >= carries)
    return frozenset(found)


def _joined_by_batch(reader: TpuReader, images: Container[int]) -> frozenset[int]:
    """Images that are joined of pieces with the batch in the lanes, which then lies there, too."""
    joined: set[int] = set()
    for equation in reader.program.equations:
        if equation.primitive is not P.concatenate_p or equation.outputs[0] not in images:
            continue
        avals = [reader.program.avals[piece] for piece in reader.pieces_of(equation)]
        pieces = [aval for aval in avals if aval.size]
        by_features = equation.params["dimension"] == len(reader.program.avals[equation.outputs[0]].shape) - 1
        by_batch = (has_batch_in_lanes(piece.shape, compat.item_bytes(piece.dtype)) for piece in pieces)
        if pieces and by_features and all(by_batch):
            joined.add(equation.outputs[0])
    return lying_as(reader.program, joined)
