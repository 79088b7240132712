"""A child process that compiles programs one after the other, and the small cache of such processes."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat_opt.targets.errors import (
    MESSAGE_CHARACTERS,
    CompilationFailed,
    TargetUnavailable,
    compiler_error,
    shortened,
)
from remat_opt.targets.export import PortableProgram
from remat_opt.targets.figures import Figures, figures_of
from remat_opt.targets.target import Target

_WORKER_FILE = Path(__file__).with_name("worker.py")

# platform → (the extra that holds its compiler, modules of which one must be there, what they are in words)
_NEEDED_MODULES = {
    "cuda": (
        "cuda-aot",
        ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
        "JAX's CUDA plugin (jax-cuda12-plugin and jax-cuda12-pjrt, or those of cuda13)",
    ),
    "tpu": ("tpu-aot", ("libtpu",), "the TPU compiler (libtpu)"),
}
_ABSENT_GPU = "compiled without the device: no autotuning, and none of its scratch memory"
# Without autotuning XLA finds no tiles for products in attention of 196 tokens, say (jax 0.10.2; 0.12 does).
_NO_TILES = "Couldn't find output tile sizes"
_TRITON = "xla_gpu_enable_triton_gemm"
_WITHOUT_TRITON = "products by cuBLAS, as XLA found no tiles for Triton's"


class Worker:
    """A live child process that compiles for one platform; starting it takes seconds, so keep it for many programs.

    Usable as a context manager. Its methods may be called from several threads; programs are compiled one at a time.
    """

    def __init__(self, target: Target, *, dump_to: Path | None = None) -> None:
        """Start the process; it imports JAX while the caller goes on.

        Args:
            target: any target of the platform to compile for.
            dump_to: folder for XLA's text dump of every program that this worker compiles.

        Raises:
            TargetUnavailable: the compiler for the target's platform is not installed.
        """
        check_installed(target)
        self.platform = target.platform
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._kernels = tempfile.TemporaryDirectory(prefix="remat_opt-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(os.environ, sys.path, dump_to),
            start_new_session=True,
        )
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        self._requests = self._process.stdin
        self._answers = self._process.stdout

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process can take another program."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, and NVIDIA's tools that it may have started; what it compiles at the moment is given up."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        # Closing flushes; what was still on its way to the process has nowhere to go.
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._errors.close()
        self._kernels.cleanup()

    def compile(
        self,
        program: PortableProgram,
        target: Target,
        *,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Figures:
        """Compile a program and read the compiler's figures.

        Args:
            program: the exported function.
            target: a target of this worker's platform.
            compiler_options: as of `jax.jit`.

        Raises:
            CompilationOutOfMemory: the compiler refuses a program that does not fit the device.
            CompilationFailed: any other refusal, or the process died.
            TargetUnavailable: the compiler does not start.
        """
        if target.platform != self.platform:
            raise ValueError(
                f"expected a target of this worker's platform {self.platform!r}, got {target.name!r} of "
                f"{target.platform!r}; start Worker(target) for it"
            )
        request = {
            "platform": target.platform,
            "config": target.compiler_config,
            "devices": target.devices,
            "nodes": target.nodes,
            "donated": program.donated,
            "mesh": program.mesh,
            "keep_unused": program.keep_unused,
            "compiler_options": dict(compiler_options or {}),
            "kernels": self._kernel_file(target) if self.platform == "cuda" else None,
            "program_bytes": len(program.serialised),
        }
        reply, tiles = self._answer(request, program.serialised, target), ""
        if _NO_TILES in reply.get("message", "") and _TRITON not in request["compiler_options"]:
            request["compiler_options"][_TRITON] = False
            reply, tiles = self._answer(request, program.serialised, target), _WITHOUT_TRITON
        if "figures" not in reply:
            raise _error(reply, target)
        if target.platform != "cuda":
            return figures_of(reply["figures"], target, note=program.note)
        note = "; ".join(filter(None, (_ABSENT_GPU, tiles, program.note)))
        return figures_of(reply["figures"], target, autotuned=False, note=note)

    def _answer(self, request: dict[str, Any], serialised: bytearray, target: Target) -> dict[str, Any]:
        """The answer to one program; without one the process ends."""
        with self._lock:
            try:
                return self._ask(request, serialised, target)
            except BaseException:
                # An answer that nobody reads would be taken for that to the next program.
                self.close()
                raise

    def _kernel_file(self, target: Target) -> str:
        """Where the kernels of one kind of device are kept."""
        return str(Path(self._kernels.name) / target.name.partition(":")[0])

    def _ask(self, request: dict[str, Any], serialised: bytearray, target: Target) -> dict[str, Any]:
        """Send one program and wait for the answer."""
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.write(serialised)
            self._requests.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._died(target) from error
        if line := self._answers.readline():
            return json.loads(line)
        raise self._died(target)

    def _died(self, target: Target) -> CompilationFailed:
        """The process is gone: what it last said is the best explanation."""
        code = self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4 * MESSAGE_CHARACTERS))
        last_words = self._errors.read().decode(errors="replace")
        return CompilationFailed(
            f"expected the compiler for {target.name} to answer, its process ended with code {code}; it last wrote: "
            f"{last_words[-MESSAGE_CHARACTERS:].strip() or 'nothing'}"
        )


def _error(reply: Mapping[str, str], target: Target) -> Exception:
    """The exception for a failure that the process reported."""
    words = f"{reply['error']}: {reply['message']}"
    if reply["stage"] == "compile":
        return compiler_error(words, target.name, target.platform)
    extra = _NEEDED_MODULES.get(target.platform, ("", (), ""))[0]
    hint = f'; write: pip install "remat_opt[{extra}]" with the version of your jax' if extra else ""
    if target.devices > 1:
        hint = f"; or write a topology that there is, as {target.name.partition(':')[0]}:4x4" + hint
    return TargetUnavailable(f"expected the compiler for {target.name} to start, got {shortened(words)}{hint}")


def check_installed(target: Target) -> None:
    """Refuse a target whose compiler is not installed, before a process is started for it.

    Raises:
        TargetUnavailable: what is missing, and what to install.
    """
    if not sys.executable:
        raise TargetUnavailable("expected a Python interpreter to start a child process with, sys.executable is empty")
    if target.platform not in ("cpu", *_NEEDED_MODULES) or (target.platform != "cpu" and not target.compiler_config):
        raise TargetUnavailable(
            f"expected a target with a compiler that works without the device, got {target.name!r} "
            f"({target.platform}); measure where it is attached (target=None)"
        )
    if target.platform == "cpu":
        return
    extra, modules, words = _NEEDED_MODULES[target.platform]
    if not any(_can_be_imported(module) for module in modules):
        raise TargetUnavailable(
            f"compiling for {target.name} needs {words}, which is not installed (linux x86_64 has it); "
            f'write: pip install "remat_opt[{extra}]"'
        )


def is_installed(target: Target) -> bool:
    """Whether there is a compiler that works without the device."""
    try:
        check_installed(target)
    except TargetUnavailable:
        return False
    return True


def extra_for(target: Target) -> str:
    """The extra that holds the compiler for an absent device; empty where none does."""
    return _NEEDED_MODULES[target.platform][0] if target.platform in _NEEDED_MODULES else ""


def _can_be_imported(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def child_environment(environment: Mapping[str, str], search_path: list[str], dump_to: Path | None) -> dict[str, str]:
    """The environment of the child: the parent's, without what steers JAX, XLA and libtpu.

    Args:
        environment: the parent's environment variables.
        search_path: the parent's `sys.path`, so that the child finds the same JAX.
        dump_to: folder for XLA's text dump, None for none.
    """
    steering = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "TF_", "PJRT_", "ENABLE_PJRT_")
    child = {name: value for name, value in environment.items() if not name.startswith(steering)}
    child["PYTHONPATH"] = os.pathsep.join(path for path in search_path if path)
    child["JAX_PLATFORMS"] = "cpu"
    # Arguments have the dtypes of the exported program, 64 bit ones included.
    child["JAX_ENABLE_X64"] = "true"
    # libtpu would look for the metadata server of a cloud machine first, and would let one process of a machine use
    # it; a process that only compiles needs neither, and so takes no TPU from anybody.
    child["TPU_SKIP_MDS_QUERY"] = "1"
    child["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    child["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if dump_to is not None:
        child["XLA_FLAGS"] = f"--xla_dump_to={Path(dump_to).absolute()} --xla_dump_hlo_as_text"
    return child


_workers: dict[str, Worker] = {}
_workers_owner: int | None = None
_workers_lock = threading.Lock()


def shared_worker(target: Target) -> Worker:
    """The one live worker of the target's platform, started at first use and closed at exit."""
    global _workers_owner
    with _workers_lock:
        if _workers_owner != os.getpid():
            # A forked child must not talk through its parent's pipes.
            _workers.clear()
            _workers_owner = os.getpid()
            atexit.register(close_workers)
        worker = _workers.get(target.platform)
        if worker is None or not worker.alive:
            worker = _workers[target.platform] = Worker(target)
        return worker


def close_workers() -> None:
    """End the live workers; the next measurement starts a new one."""
    with _workers_lock:
        while _workers and _workers_owner == os.getpid():
            _workers.popitem()[1].close()
