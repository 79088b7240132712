"""Runs candidates on the arguments of a call: what `tune` of `optimize` times. `planner/tuning.py` says which."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_opt.planner.candidates import Candidate
from remat_opt.planner.prepared import Prepared
from remat_opt.targets import CompilationFailed, Figures, Target, is_attached
from remat_opt.trace import compat

LEAST_RUNS, MOST_RUNS = 3, 20
RUN_SECONDS = 0.5  # of all runs of one candidate, after which there are no more than the least


def has_values(args: tuple, kwargs: dict) -> bool:
    """Whether arguments can be computed with: outside of any trace, and none of them is abstract."""
    leaves = jax.tree.leaves((args, kwargs))
    shaped = (leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    return compat.outside_of_any_trace() and all(isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in shaped)


def check_device(target: Target) -> None:
    """Raise ValueError where what a step takes here says nothing of where it runs."""
    if not is_attached(target):
        raise ValueError(
            f"expected the attached device to time plans on for tune=True, got {target.name}, which is not attached. "
            "Write tune=False, or leave out target where the device is"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"expected a single process for tune=True, got {jax.process_count()}: each would take the plan that was "
            "fastest for it, and all have to run the same. Write step.plan(*args).save(path) in one process with "
            "tune=True, and plan=Plan.load(path) in all"
        )


def why_not(prepared: Prepared) -> str | None:
    """Why a step cannot run more often than it is called; None where it can."""
    program = prepared.captured.program
    if program.effects:
        return "it has effects (callbacks, prints), which would happen once more for each run"
    return "it reads or writes mutable references" if program.has_references else None


class CallTimer:
    """A `Timer` of `planner/tuning.py` for the arguments of one call.

    Args:
        step: the jits of the step.
        args: of the call.
        kwargs: of the call.
        clock: counts seconds.
    """

    def __init__(self, step: Any, args: tuple, kwargs: dict, clock: Callable[[], float] | None = None):
        self.step = step
        self.args, self.kwargs = args, kwargs
        self.clock = clock or time.perf_counter
        self.compiled: dict[int, tuple[Candidate, Any]] = {}  # by a candidate's id, which it keeps its own

    def compile(self, candidate: Candidate) -> Figures | None:
        """Compile as a call would be."""
        try:
            figures = self.step.measure(self.args, self.kwargs, candidate.prepared, candidate.solution)
        except CompilationFailed:
            return None
        self.compiled[id(candidate)] = candidate, self.step.compiled
        return figures

    def run(self, candidate: Candidate) -> float | None:
        """The least seconds of several runs, after one that is not counted."""
        self.take(candidate)
        try:
            seconds = [self.seconds(candidate)]
            while len(seconds) <= LEAST_RUNS or (len(seconds) <= MOST_RUNS and sum(seconds[1:]) < RUN_SECONDS):
                seconds.append(self.seconds(candidate))
        except jax.errors.JaxRuntimeError:
            return None
        return min(seconds[1:])

    def seconds(self, candidate: Candidate) -> float:
        """Of one run, without that of the copies."""
        args, kwargs = jax.block_until_ready(with_copies(self.step.plain, self.args, self.kwargs))
        started = self.clock()
        jax.block_until_ready(self.step.call_candidate(candidate, args, kwargs))
        return self.clock() - started

    def take(self, candidate: Candidate) -> None:
        """Let the next call run a candidate."""
        _, self.step.compiled = self.compiled[id(candidate)]


def with_copies(jitted: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with copies of the arrays that a call of a jitted function would donate."""
    static = compat.describe_jit(jitted).options.get("static_argnums") or ()
    by_position, by_name = jitted.trace(*args, **kwargs).args_info
    skipped = {number % len(args) for number in static if -len(args) <= number < len(args)}
    dynamic = [at for at in range(len(args)) if at not in skipped]
    donated = {at for at, infos in zip(dynamic, by_position, strict=True) if _is_donated(infos)}
    names = {name for name, infos in by_name.items() if _is_donated(infos)}
    return (
        tuple(jax.tree.map(_copy, value) if at in donated else value for at, value in enumerate(args)),
        {name: jax.tree.map(_copy, value) if name in names else value for name, value in kwargs.items()},
    )


def _is_donated(infos: Any) -> bool:
    return any(info.donated for info in jax.tree.leaves(infos))


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
