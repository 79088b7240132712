"""What goes wrong when a program is compiled for a target, each case its own exception."""

from __future__ import annotations


class TargetUnavailable(RuntimeError):
    """The target's compiler is not installed, or does not start; the message says what to install."""


class ProgramNotPortable(ValueError):
    """The program cannot be carried to the process that compiles for an absent device."""


class CompilationFailed(RuntimeError):
    """The target's compiler refused the program; the message holds the compiler's own words, shortened."""


class CompilationTimeout(CompilationFailed, TimeoutError):
    """The compiler took longer than the caller allowed."""


class CompilationOutOfMemory(CompilationFailed):
    """The compiler refuses a program that does not fit the device (TPU compilers do, GPU compilers do not).

    Attributes:
        needed_bytes: device memory that the program would take, where the compiler says it.
        limit_bytes: device memory that there is for a program, where the compiler says it.
    """

    def __init__(self, message: str, needed_bytes: int | None = None, limit_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
