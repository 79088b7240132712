"""Ask a compiler what a step needs: the attached device's, with all that `jax.jit` was given, or an absent one's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt.program import compat
from remat_opt.targets import Figures, Target, measure_flat, read_figures
from remat_opt.targets.errors import compiler_error


def compile_here(jitted: Any, target: Target, args: tuple, kwargs: dict) -> Figures:
    """Compile as a call would be, with all shardings and options.

    Raises:
        CompilationFailed: the compiler refuses it (`CompilationOutOfMemory`: it does not fit the device).
    """
    lowered = jitted.lower(*args, **kwargs)
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise compiler_error(str(error), target.name, target.platform) from error
    return read_figures(compiled, target=target, compile_seconds=time.perf_counter() - started)


def compile_elsewhere(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    traced: Any,
    *,
    donated: Sequence[int],
    target: Target,
    compiler_options: Mapping[str, Any] | None,
    keep_unused: bool = True,
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
    inputs, outputs = compat.flat_shardings(traced)
    return measure_flat(
        fun,
        [compat.abstract(aval, sharding) for aval, sharding in zip(avals, inputs, strict=True)],
        out_shardings=outputs,
        donated=donated,
        target=target,
        compiler_options=compiler_options,
        keep_unused=keep_unused,
    )
