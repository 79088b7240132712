"""Compile a flat JAX function for a target and read the compiler's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt.targets.devices import attached_target, resolve_target
from remat_opt.targets.errors import compiler_error
from remat_opt.targets.export import export_flat
from remat_opt.targets.figures import Figures, read_figures
from remat_opt.targets.remote import Worker, check_installed, shared_worker
from remat_opt.targets.target import Target


def measure_flat(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    *,
    donated: Sequence[int] = (),
    target: Target | str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    keep_unused: bool = False,
    out_shardings: Sequence[Any] | None = None,
    worker: Worker | None = None,
) -> Figures:
    """Compile a flat function for a target, without running it.

    For the attached backend it is compiled here; for any other one in a child process, which stays alive for the next
    measurement. The parent's environment variables do not matter to the child.

    Args:
        fun: takes arrays by position, returns a list or tuple of arrays.
        avals: a `jax.ShapeDtypeStruct` for each argument; dtypes may be those of typed random keys. For a target of
            several devices with the shardings that the arguments have.
        donated: positions of the arguments whose memory may be reused for outputs.
        target: see `resolve_target`.
        compiler_options: as of `jax.jit`.
        keep_unused: as of `jax.jit`. Where it is false, what the program does not read is no argument, and what nobody
            reads is no operand of a barrier: by one operand a step may need a sixth more.
        out_shardings: of the results, for an absent target of several devices.
        worker: the child process to use instead of the shared one.

    Raises:
        TargetUnavailable: the target's compiler is not installed or does not start.
        ProgramNotPortable: the program cannot be carried to the child process.
        CompilationFailed: the compiler refuses the program (`CompilationOutOfMemory`: it does not fit the device).
    """
    target = resolve_target(target)
    if worker is None and is_attached(target):
        jitted = jax.jit(lambda *x: list(fun(*x)), donate_argnums=tuple(donated), keep_unused=keep_unused)
        return compile_lowered(jitted.lower(*avals), target, compiler_options)
    check_installed(target)
    program = export_flat(
        fun, avals, target=target, donated=donated, keep_unused=keep_unused, out_shardings=out_shardings
    )
    return (worker or shared_worker(target)).compile(program, target, compiler_options=compiler_options)


def is_attached(target: Target) -> bool:
    """Whether JAX's default backend is this target."""
    return attached_target().name == target.name


def compile_lowered(lowered: Any, target: Target, compiler_options: Mapping[str, Any] | None = None) -> Figures:
    """Compile what was lowered for the attached backend, and read the compiler's figures.

    Args:
        lowered: what `jax.jit(...).lower(...)` returns.
        target: the attached backend.
        compiler_options: beside those of the jit.

    Raises:
        CompilationFailed: the compiler refuses it (`CompilationOutOfMemory`: it does not fit the device).
    """
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options or {}) or None)
    except jax.errors.JaxRuntimeError as error:
        raise compiler_error(str(error), target.name, target.platform) from error
    return read_figures(compiled, target=target, compile_seconds=time.perf_counter() - started)
