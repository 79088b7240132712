"""What goes wrong when a program is compiled for a target, each case its own exception."""

from __future__ import annotations

import re

MESSAGE_CHARACTERS = 1500
_CUDA_TOOLS_MISSING = re.compile(r"libdevice|ptxas|nvlink", re.IGNORECASE)
# What libtpu says of all the memory of a program, its arguments and outputs included; the second in older releases.
_OUT_OF_MEMORY = re.compile(
    r"total memory required .*?\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    r"|Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"
)
_BINARY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class TargetUnavailable(RuntimeError):
    """The target's compiler is not installed, or does not start; the message says what to install."""


class ProgramNotPortable(ValueError):
    """The program cannot be carried to the process that compiles for an absent device."""


class CompilationFailed(RuntimeError):
    """The target's compiler refused the program; the message holds the compiler's own words, shortened."""


class CompilationOutOfMemory(CompilationFailed):
    """The compiler refuses a program that does not fit the device (TPU compilers do, GPU compilers do not).

    Attributes:
        needed_bytes: device memory that the program would take, arguments and outputs included, to the two decimals of
            the compiler's message; None where it does not say.
        limit_bytes: device memory that there is for a program; None where the compiler does not say.
    """

    def __init__(self, message: str, needed_bytes: int | None = None, limit_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


def shortened(message: str) -> str:
    """A compiler's words, cut in the middle where they are many."""
    if len(message) <= MESSAGE_CHARACTERS:
        return message
    head, tail = 2 * MESSAGE_CHARACTERS // 3, MESSAGE_CHARACTERS // 3
    return f"{message[:head]} … [{len(message) - head - tail} characters left out] … {message[-tail:]}"


def compiler_error(message: str, target: str, platform: str) -> RuntimeError:
    """The exception for what the compiler of a target said."""
    if platform == "cuda" and _CUDA_TOOLS_MISSING.search(message):
        return TargetUnavailable(
            "expected NVIDIA's compiler tools (nvidia-cuda-nvcc-cu12, or nvidia-cuda-nvcc for cuda13), got "
            f'{shortened(message)}; write: pip install "remat_opt[cuda-aot]"'
        )
    failure = f"expected the compiler for {target} to accept the program, got {shortened(message)}"
    if found := _OUT_OF_MEMORY.search(message):
        needed, needed_unit, limit, limit_unit = (group for group in found.groups() if group is not None)
        return CompilationOutOfMemory(
            failure,
            round(float(needed) * _BINARY_UNITS[needed_unit]),
            round(float(limit) * _BINARY_UNITS[limit_unit]),
        )
    return CompilationFailed(failure)
