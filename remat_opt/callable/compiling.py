"""Ask a compiler what a step needs: the attached device's, with all that `jax.jit` was given, or an absent one's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_opt.planner.candidates import Candidate
from remat_opt.planner.prepared import Prepared
from remat_opt.search import Solution
from remat_opt.targets import (
    CompilationFailed,
    CompilationOutOfMemory,
    Figures,
    Target,
    compile_lowered,
    measure_flat,
)
from remat_opt.targets.options import compiler_options_for
from remat_opt.trace import compat
from remat_opt.trace.avals import abstract
from remat_opt.trace.placement import flat_shardings


def compile_here(jitted: Any, target: Target, args: tuple, kwargs: dict) -> Figures:
    """Compile as a call would be, with all shardings and options.

    Raises:
        CompilationFailed: the compiler refuses it (`CompilationOutOfMemory`: it does not fit the device).
    """
    return compile_lowered(jitted.lower(*args, **kwargs), target)


def compile_as_called(jitted: Any, target: Target, args: tuple, kwargs: dict) -> Figures:
    """The same; what a compiler refuses for another reason than memory is raised as a call would raise it."""
    try:
        return compile_here(jitted, target, args, kwargs)
    except CompilationFailed as failure:
        if isinstance(failure, CompilationOutOfMemory) or failure.__cause__ is None:
            raise
        raise failure.__cause__ from None


def compile_candidate(
    prepared: Prepared, solution: Solution | None, options: Mapping[str, Any] | None = None
) -> Figures:
    """Compile a step on flat arguments for the device that it is planned for, with our compiler options where something
    is changed, as a call would be.

    Args:
        prepared: the step.
        solution: what is written; None for the original step under our options, of which a budget may be a part.
        options: of `jax.jit`, whose compiler options ours are put under.
    """
    options = options or {}
    compiler_options = options.get("compiler_options")
    if solution is None or not Candidate(prepared, solution).is_unchanged:
        compiler_options = compiler_options_for(prepared.target.platform, compiler_options, offloads=prepared.offloads)
    captured, target = prepared.captured, prepared.target
    plain = compat.function_of_jaxpr(captured.traced)
    return compile_elsewhere(
        plain if solution is None else lambda *leaves: prepared.emit(solution, leaves),
        captured.input_avals,
        captured.traced,
        donated=[index for index, given in enumerate(captured.donated) if given],
        target=target,
        compiler_options=compiler_options,
        keep_unused=options.get("keep_unused", False),
    )


def compile_elsewhere(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    traced: Any,
    *,
    donated: Sequence[int],
    target: Target,
    compiler_options: Mapping[str, Any] | None,
    keep_unused: bool = False,
) -> Figures:
    """Compile for a device that is not attached.

    Args:
        fun: the step on flat arguments.
        avals: of the arguments.
        traced: the step as it was traced, for its shardings.
        donated: positions of the arguments whose memory may be reused.
        target: the device.
        compiler_options: as of `jax.jit`.
        keep_unused: as of `jax.jit`.
    """
    inputs, outputs = flat_shardings(traced)
    return measure_flat(
        fun,
        [abstract(aval, sharding) for aval, sharding in zip(avals, inputs, strict=True)],
        out_shardings=outputs,
        donated=donated,
        target=target,
        compiler_options=compiler_options,
        keep_unused=keep_unused,
    )
