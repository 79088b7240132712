"""What a compiler says of a compiled program."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

import jax

from remat_opt.targets.communication import Collectives, collectives_of
from remat_opt.targets.devices import Target
from remat_opt.targets.worker import compiled_numbers, compiler_version, recomputed_by_xla, text_of_several_devices


@dataclass(frozen=True)
class Figures:
    """The compiler's figures of one program for one target. All sizes are bytes of one device.

    Attributes:
        temp_bytes: buffers that live only inside the program, packed as the compiler packs them (and gaps between them
            once more: `reports_gaps_twice`).
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
        required = known - {"compiler", "note", "collectives", "recomputed_by_xla", "xla_limit_bytes"}
        if not required <= set(values) <= known:
            raise ValueError(
                f"figures have the fields {sorted(known)}; missing {sorted(required - set(values))}, not known "
                f"{sorted(set(values) - known)}; read them with the remat_opt that wrote them, or measure again"
            )
        sent = values.get("collectives")
        return cls(**{**values, "collectives": sent and Collectives.from_json(sent)})


def limit_of_xla(target: Target, numbers: Mapping[str, Any]) -> int | None:
    """Temporary memory above which XLA recomputes on its own, of a program with these sizes (see `Figures`)."""
    sizes = numbers["argument_bytes"], numbers["output_bytes"], numbers["alias_bytes"]
    return target.xla_limit(sizes[0] + sizes[1] - sizes[2])


@functools.cache
def reports_gaps_twice(platform: str) -> bool:
    """Whether the installed compiler adds to the temporary memory that it allocates what lies idle there at its peak.

    libtpu does before 0.0.51: of VGG-11 (batch 64, v5e) it allocates 6958 MB, of which 5399 are live, and reports 8518.
    """
    version = re.fullmatch(r"libtpu (\d+)\.(\d+)\.(\d+).*", compiler_version(platform))
    return bool(version) and tuple(map(int, version.groups())) < (0, 0, 51)


def read_figures(compiled: Any, *, target: Target, compile_seconds: float = 0.0, note: str = "") -> Figures:
    """The figures of a function that was compiled for the attached device.

    Args:
        compiled: what `jax.jit(...).lower(...).compile()` returns.
        target: the target of the attached device.
        compile_seconds: wall time that the compiler took.
        note: see `Figures`.
    """
    numbers = compiled_numbers(compiled)
    return Figures(
        **numbers,
        compile_seconds=compile_seconds,
        target=target.name,
        jax_version=jax.__version__,
        jaxlib_version=metadata.version("jaxlib"),
        autotuned=True,
        compiler=compiler_version(target.platform),
        note=note,
        collectives=collectives_of(text_of_several_devices(compiled)),
        recomputed_by_xla=0 if target.platform == "cpu" else recomputed_by_xla(compiled),
        xla_limit_bytes=limit_of_xla(target, numbers),
    )
