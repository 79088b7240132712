"""A step with its batch split into as many chunks as a user says, or an error that says why that cannot be."""

from __future__ import annotations

from typing import Any

import jax

from remat_opt.planner.prepared import Prepared
from remat_opt.rewrites.split.batch import Batch, place_of


def in_chunks(prepared: Prepared, chunks: int) -> Prepared:
    """The step in so many chunks.

    A batch that they do not divide is refused: a smaller last chunk would have to be compiled as a second copy of the
    whole step, and padding would change means.

    Raises:
        ValueError: there is no batch, it has no so many equal parts, or the whole of it is needed on the way.
    """
    if prepared.captured.program.has_references:
        raise ValueError(
            f"expected a step without references to split, got one that reads or writes mutable references. {_INSTEAD}"
        )
    batch = prepared.batch
    if batch is None or not batch.can_be_split:
        raise ValueError(f"expected a batch that can be split into {chunks}, found none{_needed(batch)}. {_INSTEAD}")
    rows = batch.rows_of_device
    of_what = "the batch" if batch.parts == 1 else "each device"
    if chunks > rows:
        raise ValueError(
            f"expected at most {rows} chunks, as {of_what} has rows, got split={chunks}. Write "
            f"{f'split={rows} or less' if rows > 1 else 'split=False'}"
        )
    if rows % chunks:
        below, above = (
            max((k for k in batch.numbers if k < chunks), default=0),
            min(k for k in batch.numbers if k > chunks),
        )
        near = " or ".join(f"split={k}" for k in (below, above) if k)
        what = f"the batch of {rows}" if batch.parts == 1 else f"the {rows} rows of each device"
        other = rows - rows % chunks
        raise ValueError(
            f"expected a number that divides {what}, got split={chunks}. Write {near}, or give {of_what} {other} or "
            f"{other + chunks} rows"
        )
    return prepared.in_chunks(chunks)


_INSTEAD = "Write split=False"
MOST_NAMED = 3  # operations in a note
WORTH_SAYING = 2  # times the plain step's time; times as many chunks as fewer that divide a batch


def note_of_split(original: Prepared, chunks: int, extra_seconds: float = 0.0) -> str:
    """A sentence on what is split and what ended the loop over chunks; empty where nothing is.

    Args:
        original: the step before.
        chunks: into how many its batch is split.
        extra_seconds: estimated for the plan. Starting kernels takes time that no FLOPs tell of.
    """
    batch = original.batch if chunks else None
    if batch is None:
        return ""
    names = _names_of_arguments(original)
    split = ", ".join(f"{names[at]} along axis {axis}" for at, axis in batch.arguments)
    on = f" on each of {batch.parts} devices" if batch.parts > 1 else ""
    said = f"the batch of {batch.rows} ({split}) runs in {chunks} chunks{on}"
    times = 1 + extra_seconds / max(original.plain_graph.seconds, 1e-12)
    if times > WORTH_SAYING:
        said += f", in about {times:,.0f} times the plain step's time"
        fewer = max((k for k in batch.numbers if k < chunks), default=1)
        if fewer * WORTH_SAYING < chunks:
            said += f" (its next smaller divisor is {fewer}: another batch may take less)"
    needed = list(dict.fromkeys(map(place_of, (*batch.reductions_used_by_rows, *batch.whole_batch_readers))))
    return f"{said}, the whole of it is needed by {'; '.join(needed[:MOST_NAMED])}" if needed else said


def _names_of_arguments(prepared: Prepared) -> list[str]:
    """For each input of the program what it is among the arguments of the call."""
    captured = prepared.captured
    leaves = jax.tree_util.tree_leaves_with_path(captured.traced.args_info)
    return [*["a value of the function's closure"] * len(captured.closed_over), *(_name(path) for path, _ in leaves)]


def _name(path: tuple[Any, ...]) -> str:
    of_keywords, first, *inner = path
    place = first.key if of_keywords.idx else f"argument {first.idx}"
    return f"{place}{jax.tree_util.keystr(tuple(inner))}"


def _needed(batch: Batch | None) -> str:
    """What needs the whole batch, for the end of a sentence."""
    if batch is None or not (found := (*batch.reductions_used_by_rows, *batch.whole_batch_readers)):
        return ""
    return f": the whole batch is needed by {place_of(found[0])}"
