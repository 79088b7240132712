"""Capture: a function and its arguments become a flat program, with donation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from remat_opt.rewrites.handed_back import without_copies
from remat_opt.rewrites.masks import mask_by_outputs
from remat_opt.rewrites.one_hot import FUSING_PLATFORMS, by_comparison
from remat_opt.trace import compat
from remat_opt.trace.inline import Program, inline
from remat_opt.trace.mapped import in_two_parts


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """One traced signature of a jitted function.

    Attributes:
        traced: JAX's own record; its jaxpr is the same object for every call of the same signature.
        original: the flat program as it was traced.
        program: the same as it is planned and written, without copies of stacks (`handed_back.py`), with other masks
            (`masks.py`), fewer scatters (`one_hot.py`) and each `shard_map` that communicates in two parts
            (`mapped.py`). The inputs of both are the values the function closes over while it is differentiated or
            batched (`closed_over`), then the flat dynamic arguments.
        donated: for each input of the program whether its buffer may be reused.
        closed_over: tracers of an outer transform that the function reads without having them as arguments.
    """

    traced: Any
    original: Program
    program: Program
    donated: tuple[bool, ...]
    closed_over: tuple[Any, ...]

    @property
    def input_avals(self) -> tuple[Any, ...]:
        """Abstract values of the program's inputs."""
        return tuple(self.program.avals[value] for value in self.program.inputs)


def capture(
    jitted: Any, args: tuple, kwargs: dict, *, keep_checkpoints: bool = False, platform: str = "cpu"
) -> Captured:
    """Trace a jitted function on arguments (arrays, tracers or `ShapeDtypeStruct`s) and flatten what it does."""
    traced = jitted.trace(*args, **kwargs)
    return capture_traced(traced, platform=platform, keep_checkpoints=keep_checkpoints)


def capture_traced(traced: Any, *, platform: str = "cpu", **inline_options: bool) -> Captured:
    """The same for a function that has been traced.

    Args:
        traced: JAX's record.
        platform: what it is to be compiled for; some operations are written in another form for it.
        inline_options: of `inline`.
    """
    closed_over = compat.closed_over_tracers(traced)
    given = tuple(info.donated for info in jax.tree.leaves(traced.args_info))
    # Compilers drop what no loop reads; else the search would see residuals that nobody stores.
    closed = compat.without_dead_code(traced.jaxpr)
    program = inline(closed, **inline_options)
    shorter = without_copies(closed)
    planned = program if shorter is closed else inline(shorter, **inline_options)
    planned = by_comparison(planned) if platform in FUSING_PLATFORMS else planned
    planned = mask_by_outputs(in_two_parts(planned))
    return Captured(traced, program, planned, (False,) * len(closed_over) + given, closed_over)


def dynamic_leaves(args: tuple, kwargs: dict) -> list[Any]:
    """The flat dynamic arguments of a function that is being traced by `jax.jit`: all leaves but the static ones."""
    return [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, compat.Tracer)]
