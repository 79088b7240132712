"""What a compiler says of a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from remat_opt.targets.communication import Collectives, read_collectives
from remat_opt.targets.target import Target
from remat_opt.targets.worker import compiled_figures


@dataclass(frozen=True)
class Figures:
    """The compiler's figures of one program for one target. All sizes are bytes of one device.

    Attributes:
        temp_bytes: buffers that live only inside the program, packed as the compiler packs them (libtpu before 0.0.51
            counts what lies idle between them at the peak twice).
        argument_bytes: the arguments, in the target's layouts.
        output_bytes: the outputs, in the target's layouts.
        alias_bytes: arguments whose memory is reused for outputs, because they are donated.
        generated_code_bytes: the program itself, where the backend counts it (TPU).
        flops: floating point operations as the compiler counts them (a loop's body may count once); None where it
            does not (absent GPUs).
        compile_seconds: wall time of the compiler alone, without tracing and lowering.
        target: name of the target.
        jax_version: of the process that compiled.
        jaxlib_version: of the process that compiled.
        autotuned: False where the compiler would try kernels on the device, and could not because it is absent: what
            autotuning chooses, and its scratch memory, are then missing from the figures.
        compiler: the installed distribution that holds the compiler, as "libtpu 0.0.51".
        note: what else a reader has to know; empty if nothing.
        collectives: what the devices send each other; None for a program of one device.
        recomputed_by_xla: how many instructions the compiler recomputes on its own, to save memory.
        xla_limit_bytes: temporary memory above which it does so; None where that is not known.
        host_temp_bytes: buffers in the host's memory that live only inside the program.
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    flops: float | None
    compile_seconds: float
    target: str
    jax_version: str
    jaxlib_version: str
    autotuned: bool
    compiler: str = ""
    note: str = ""
    collectives: Collectives | None = None
    recomputed_by_xla: int = 0
    xla_limit_bytes: int | None = None
    host_temp_bytes: int = 0

    @property
    def physical_peak_bytes(self) -> int:
        """The most memory that the program takes on its device, in bytes."""
        return self.temp_bytes + self.argument_bytes + self.output_bytes - self.alias_bytes

    def as_json(self) -> dict[str, Any]:
        """All fields as values that `json.dump` writes."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Figures:
        """The inverse of `as_json`.

        Raises:
            ValueError: a field is missing or is not known.
        """
        known = {field.name for field in fields(cls)}
        required = known - {
            "compiler",
            "note",
            "collectives",
            "recomputed_by_xla",
            "xla_limit_bytes",
            "host_temp_bytes",
        }
        if not required <= set(values) <= known:
            raise ValueError(
                f"figures have the fields {sorted(known)}; missing {sorted(required - set(values))}, not known "
                f"{sorted(set(values) - known)}; read them with the remat_opt that wrote them, or measure again"
            )
        sent = values.get("collectives")
        return cls(**{**values, "collectives": sent and Collectives.from_json(sent)})


def read_figures(compiled: Any, *, target: Target, compile_seconds: float = 0.0) -> Figures:
    """The figures of a function that was compiled for the attached device."""
    return figures_of(compiled_figures(compiled, target.platform, compile_seconds), target)


def figures_of(found: dict[str, Any], target: Target, *, autotuned: bool = True, note: str = "") -> Figures:
    """The figures that `compiled_figures` found, here or in a child process."""
    text = found.pop("text")
    in_and_out = found["argument_bytes"] + found["output_bytes"] - found["alias_bytes"]
    return Figures(
        **found,
        target=target.name,
        autotuned=autotuned,
        note=note,
        collectives=None if text is None else read_collectives(text),
        xla_limit_bytes=target.xla_limit(in_and_out),
    )
