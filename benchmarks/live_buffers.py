"""Which buffers are live when a compiled program takes the most memory: read from XLA's text dump.

The CPU, GPU and TPU compilers of jax 0.10 to 0.12 write the same four files for a module; three are read here:

- `…-buffer-assignment.txt`: every buffer's place, with its size in the backend's layout;
- `…-live-range.txt`: the order of the instructions, and from which one to which one each buffer lives;
- `…-buffer-assignment-values.txt`: the instruction that makes a buffer, with its metadata.

The list "Live ranges at … (peak)" at the end of the second file is not used: its sizes are without the layout's padding
(a quarter of the true ones for 32 channels on a TPU), and it counts a TPU's on-chip memory as well. The peak here is
that of the temporary buffers in the device's main memory, of which `temp_bytes` is the packed size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ASSIGNMENT_SUFFIX = "-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*?):?$")
# "(phi)": what a loop carries, as its steps see it.
_VALUE = re.compile(r"^\s*value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)$")
_INSTRUCTION = re.compile(r"^    (\d+):(\S+)$")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_DEFINITION = re.compile(r"^\s*from instruction: (?:ROOT )?%?(\S+) = .*? [\w-]+\((?:%([\w.-]+))?")
_OPERATION = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
# What measuring puts in front of the program's own names.
_MEASURING = re.compile(r"^jit\(program\)/(?:call_exported/jit\(\w+\)/)?")
_MAIN_MEMORY = "0"


@dataclass(frozen=True)
class LiveBuffer:
    """One buffer.

    Attributes:
        bytes: its size in the backend's layout.
        instruction: the HLO instruction that makes it, with the index into its outputs where it has several.
        shape: the HLO shape with its layout.
        op_name: JAX's name stack and primitive for that instruction, of a copy those of what it copies; empty where the
            compiler made it up.
        role: "temporary", "argument", "output" or "constant": whose memory it lies in.
    """

    bytes: int
    instruction: str
    shape: str
    op_name: str
    role: str


@dataclass(frozen=True)
class LivePeak:
    """The moment at which the temporary buffers are the most.

    Attributes:
        instruction: the HLO instruction that runs at this moment.
        op_name: JAX's name stack and primitive for it, as of a buffer.
        live_bytes: temporary buffers live at this moment.
        allocated_bytes: what the compiler allocates for temporary buffers; more, where they cannot be packed tightly.
        buffers: the buffers live at this moment, the largest first.
    """

    instruction: str
    op_name: str
    live_bytes: int
    allocated_bytes: int
    buffers: tuple[LiveBuffer, ...]


@dataclass(frozen=True)
class _Value:
    """A line of the buffer assignment: a value, and where it lies."""

    name: str
    index: str
    size: int
    offset: int
    shape: str
    allocation: int
    role: str


def read_live_buffers(dump: Path, *, temporaries_only: bool = True) -> LivePeak:
    """Read the dump of one program: by `Worker(target, dump_to=dump)` or XLA's flag `--xla_dump_to`.

    Args:
        dump: the folder; of several modules in it the one with the most temporary memory is taken.
        temporaries_only: leave out arguments, outputs and constants.

    Raises:
        FileNotFoundError: the folder holds no buffer assignment.
    """
    files = sorted(Path(dump).glob(f"*{_ASSIGNMENT_SUFFIX}"))
    if not files:
        raise FileNotFoundError(
            f"expected XLA's text dump (*{_ASSIGNMENT_SUFFIX}) in {dump}, found none; write "
            "Worker(target, dump_to=folder), or set XLA_FLAGS='--xla_dump_to=folder --xla_dump_hlo_as_text'"
        )
    modules = [(*_read_assignment(file), file) for file in files]
    allocated, values, file = max(modules, key=lambda module: module[0])
    stem = file.name.removesuffix(_ASSIGNMENT_SUFFIX)
    sequence, ranges = _read_live_ranges(file.with_name(f"{stem}-live-range.txt"))
    op_names = _read_op_names(file.with_name(f"{stem}-buffer-assignment-values.txt"))
    whole = (0, max(sequence, default=0))
    spans = [ranges.get((value.name, value.index), whole) for value in values]
    temporaries = [(value, span) for value, span in zip(values, spans, strict=True) if value.role == "temporary"]
    moment, live_bytes = _peak(temporaries)
    live = {}
    for value, (start, end) in zip(values, spans, strict=True):
        place = (value.allocation, value.offset)
        if start <= moment <= end and (value.role == "temporary" or not temporaries_only):
            live[place] = max(live.get(place, value), value, key=lambda candidate: candidate.size)
    buffers = [
        LiveBuffer(value.size, value.name + value.index, value.shape, op_names.get(value.name, ""), value.role)
        for value in live.values()
        if value.size
    ]
    buffers.sort(key=lambda buffer: (-buffer.bytes, buffer.instruction))
    instruction = sequence.get(moment, "")
    return LivePeak(instruction, op_names.get(instruction, ""), live_bytes, allocated, tuple(buffers))


def live_buffer_rows(peak: LivePeak, limit: int | None = 20) -> list[tuple[str, str, str, str]]:
    """A table of the largest live buffers: a header and one row for each (MB are 10⁶ bytes)."""
    rows = [("MB", "instruction", "shape", "operation")]
    for buffer in peak.buffers[:limit]:
        rows.append((f"{buffer.bytes / 1e6:.2f}", buffer.instruction, buffer.shape, buffer.op_name))
    return rows


def _read_assignment(file: Path) -> tuple[int, list[_Value]]:
    """Bytes of all temporary allocations in main memory, and the values in main memory."""
    allocated, values, allocation, role = 0, [], -1, ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if found := _ALLOCATION.match(line):
                allocation, role = int(found[1]), _role(found[3])
                # On a TPU colour 1 is the on-chip vector memory, on a GPU that of collectives.
                if role == "temporary" and "color " not in found[3]:
                    allocated += int(found[2])
            elif (found := _VALUE.match(line)) and role and found[3] == _MAIN_MEMORY:
                name, index, _, size, offset, shape = found.groups()
                values.append(_Value(name, index or "{}", int(size), int(offset), shape, allocation, role))
            elif not line[0].isspace() and not line.startswith("BufferAssignment"):
                role = ""  # statistics that follow the allocations
    return allocated, values


def _role(description: str) -> str:
    """Whose memory an allocation is, from the words after its size; empty for what is not device memory."""
    if "thread-local" in description:
        return ""
    for words, role in (("parameter ", "argument"), ("constant", "constant"), ("live-out", "output")):
        if words in description:
            return role
    return "output" if description.startswith("output shape") else "temporary"


def _read_live_ranges(file: Path) -> tuple[dict[int, str], dict[tuple[str, str], tuple[int, int]]]:
    """Position → instruction, and (instruction, index) → first and last position of its life."""
    sequence: dict[int, str] = {}
    ranges: dict[tuple[str, str], tuple[int, int]] = {}
    if not file.exists():
        return sequence, ranges
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if found := _RANGE.match(line):
                ranges[found[1], found[2]] = int(found[3]), int(found[4])
            elif found := _INSTRUCTION.match(line):
                sequence[int(found[1])] = found[2]
            elif "(peak)" in line:
                break
    return sequence, ranges


def _read_op_names(file: Path) -> dict[str, str]:
    """Instruction → `op_name` of its metadata, or of its first operand's where it has none (a copy)."""
    op_names: dict[str, str] = {}
    nameless: dict[str, str] = {}
    if not file.exists():
        return op_names
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not (definition := _DEFINITION.match(line)):
                continue
            if operation := _OPERATION.search(line):
                op_names[definition[1]] = _MEASURING.sub("", operation[1])
            elif definition[2]:
                nameless[definition[1]] = definition[2]
    for name in nameless:
        source, seen = name, set()
        while source in nameless and source not in seen:
            seen.add(source)
            source = nameless[source]
        if source in op_names:
            op_names[name] = op_names[source]
    return op_names


def _peak(values: Iterable[tuple[_Value, tuple[int, int]]]) -> tuple[int, int]:
    """Position and bytes of the highest sum of live buffers; values at the same place share their memory."""
    starts, ends = defaultdict(list), defaultdict(list)
    for value, (start, end) in values:
        starts[start].append(value)
        ends[end + 1].append(value)
    at_place: dict[tuple[int, int], list[int]] = defaultdict(list)
    total, best, moment = 0, 0, 0
    for position in sorted(starts.keys() | ends.keys()):
        for changed, arrives in ((ends[position], False), (starts[position], True)):
            for value in changed:
                sizes = at_place[value.allocation, value.offset]
                total -= max(sizes, default=0)
                if arrives:
                    sizes.append(value.size)
                else:
                    sizes.remove(value.size)
                total += max(sizes, default=0)
        if total > best:
            best, moment = total, position
    return moment, best
