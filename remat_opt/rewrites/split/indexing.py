"""The rules of gathers and scatters: by rows of indices, by batching dimensions, along whole dimensions of slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.rewrites.split.layouts import Factor, Run, Sum, View, along, resized


def gather(view: View) -> list[Factor]:
    """Operands are the array and the indices, whose last axis holds the places of one slice."""
    numbers, sizes = view.params["dimension_numbers"], view.params["slice_sizes"]
    rank = len(view.shape_out())
    rows = [axis for axis in range(rank) if axis not in numbers.offset_dims]  # of the result, as of the indices
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    found = [Factor((batching.get(axis), axis), (row,)) for axis, row in enumerate(rows)]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(view.shape(0))) if axis not in gone]
    for axis, at in zip(kept, numbers.offset_dims, strict=True):
        if axis not in numbers.start_index_map and sizes[axis] == view.shape(0)[axis]:
            found.append(Factor((axis, None), (at,), resized("slice_sizes", axis)))
    return found


def scatter(view: View) -> list[Factor]:
    """Operands are the array, the indices and the updates; along what the array has, too."""
    numbers = view.params["dimension_numbers"]
    rows = _rows_of_updates(view)
    batching = zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    found = [Factor((array, axis, rows[axis]), (array,)) for axis, array in batching]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(view.shape(0))) if axis not in gone]
    for axis, at in zip(kept, numbers.update_window_dims, strict=True):
        if axis not in numbers.scatter_dims_to_operand_dims and view.shape(2)[at] == view.shape(0)[axis]:
            found.append(Factor((axis, None, at), (axis,)))
    return found


def _rows_of_updates(view: View) -> Sequence[int]:
    windows = view.params["dimension_numbers"].update_window_dims
    return [axis for axis in range(len(view.shape(2))) if axis not in windows]


def _summed(view: View) -> list[Factor]:
    """Rows of indices and updates that are added to one array."""
    batching = view.params["dimension_numbers"].scatter_indices_batching_dims
    rows = _rows_of_updates(view)
    return [Factor((None, axis, row), (Sum.ADD,)) for axis, row in enumerate(rows) if axis not in batching]


def scatter_add(view: View) -> Run | None:
    """As `scatter`, or added up: then the array itself counts once, in the first chunk."""
    run = along(lambda view: [*scatter(view), *_summed(view)])(view)
    if run is None or run.outputs != (Sum.ADD,):
        return run
    return dataclasses.replace(run, inputs=(Sum.ADD, *run.inputs[1:]))
