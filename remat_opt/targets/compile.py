"""Compile a flat JAX function for a target and read the compiler's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax

from remat_opt.targets.devices import Target, attached_target, resolve_target
from remat_opt.targets.errors import compiler_error
from remat_opt.targets.export import export_flat
from remat_opt.targets.figures import Figures, read_figures
from remat_opt.targets.remote import Worker, check_installed, shared_worker


def measure_flat(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    *,
    donated: Sequence[int] = (),
    target: Target | str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    keep_unused: bool = True,
    out_shardings: Sequence[Any] | None = None,
    dump_to: Path | None = None,
    time_limit: float | None = None,
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
        keep_unused: as of `jax.jit`; whether arguments that the program does not read count.
        out_shardings: of the results, for an absent target of several devices.
        dump_to: folder for XLA's text dump, which `read_live_buffers` reads; the program is then compiled in a
            child process of its own, except on an attached accelerator.
        time_limit: seconds to wait for a child process; a compilation in this process is not limited.
        worker: the child process to use instead of the shared one.

    Raises:
        TargetUnavailable: the target's compiler is not installed or does not start.
        ProgramNotPortable: the program cannot be carried to the child process.
        CompilationFailed: the compiler refuses the program (`CompilationOutOfMemory`: it does not fit the device), or
            took longer than `time_limit` (`CompilationTimeout`).
    """
    target = resolve_target(target)
    options = dict(compiler_options or {})
    if worker is None and is_attached(target) and (dump_to is None or target.platform != "cpu"):
        if dump_to is not None:
            options |= {"xla_dump_to": str(Path(dump_to).absolute()), "xla_dump_hlo_as_text": True}
        return _measure_here(fun, avals, tuple(donated), target, options, keep_unused)
    if worker is not None and dump_to is not None:
        raise ValueError(
            "expected either worker or dump_to, got both: a process dumps all of its programs or none; write "
            "Worker(target, dump_to=…)"
        )
    check_installed(target)
    program = export_flat(
        fun, avals, target=target, donated=donated, keep_unused=keep_unused, out_shardings=out_shardings
    )
    if dump_to is not None:
        context = Worker(target, dump_to=dump_to)
    else:
        context = nullcontext(worker or shared_worker(target))
    with context as process:
        return process.compile(program, target, compiler_options=options, time_limit=time_limit)


def is_attached(target: Target) -> bool:
    """Whether JAX's default backend is this target."""
    return attached_target().name == target.name


def _measure_here(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    donated: tuple[int, ...],
    target: Target,
    compiler_options: Mapping[str, Any],
    keep_unused: bool,
) -> Figures:
    """Compile in this process, for the attached backend."""

    def program(*values):
        return list(fun(*values))

    lowered = jax.jit(program, donate_argnums=donated, keep_unused=keep_unused).lower(*avals)
    return compile_lowered(lowered, target, compiler_options)


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
