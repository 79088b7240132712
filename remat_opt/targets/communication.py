"""The collectives of a compiled program: what its devices send each other in one run.

Where the compiler divides the arrays among devices, the program that it is given has no collectives; they are in its
text alone. There a collective carries the name scopes of the operation that it was made for, and so tells whether that
was recomputed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from remat_opt.trace.scopes import recomputed_in

_COLLECTIVE = re.compile(
    r" = (.*?) (?:all-reduce|(all-gather)|reduce-scatter|all-to-all|ragged-all-to-all|collective-broadcast|"
    r"collective-permute)(?:-start)?\((.*?)(?:\), |\)$)"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # a type: its bits, and its shape
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_STEPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

Path = tuple[int, ...]
"""A value of the step's program by its id; behind the first result of a loop the value of the loop's body."""


@dataclass(frozen=True)
class Collectives:
    """What the devices send each other in one run of a program.

    Attributes:
        arrays: how many arrays are sent. Several that the compiler sends together count one by one, and those that a
            loop sends as often as it runs, where the compiler says how often.
        gathers: how many of these are put together from their parts.
        bytes: of the results of all, on one device.
        recomputed: values that are recomputed and communicate in it, in ascending order.
    """

    arrays: int
    recomputed: tuple[Path, ...] = ()
    gathers: int = 0
    bytes: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Collectives:
        """The inverse of `dataclasses.asdict`, through JSON."""
        paths = tuple(tuple(path) for path in values["recomputed"])
        return cls(values["arrays"], paths, values.get("gathers", 0), values.get("bytes", 0))


def read_collectives(text: str) -> Collectives:
    """Count the collectives of a compiled program, given as XLA's text."""
    computations = dict(_computations(text.splitlines()))
    entry = next((name for name, (is_entry, _) in computations.items() if is_entry), None)
    arrays, gathers, size, recomputed = 0, 0, 0, set()
    for name, times in _runs(computations, entry).items():
        for line in computations[name][1]:
            found = _COLLECTIVE.search(line)
            if found:
                operands = max(1, found[3].count("%"))
                arrays += times * operands
                gathers += times * operands if found[2] else 0
                size += times * _bytes_of(found[1], operands)
                recomputed.update(recomputed_in(line))
    return Collectives(arrays, tuple(sorted(recomputed)), gathers, size)


def _bytes_of(types: str, operands: int) -> int:
    """Bytes of the results of a collective; one that begins here and ends later may name its operands before them."""
    every = _ARRAY.findall(types)
    results = every[operands : 2 * operands] or every
    return sum(int(bits or 8) * math.prod(map(int, filter(None, shape.split(",")))) // 8 for bits, shape in results)


def _computations(lines: Iterable[str]) -> Iterator[tuple[str, tuple[bool, list[str]]]]:
    """Each computation's name with whether it is the entry, and its instructions."""
    body: list[str] = []
    for line in lines:
        if not line.startswith(" ") and (found := _COMPUTATION.match(line)) and "HloModule" not in line:
            body = []
            yield found[2], (found[1] is not None, body)
        else:
            body.append(line)


def _runs(computations: Mapping[str, tuple[bool, list[str]]], entry: str | None) -> Counter[str]:
    """How often each computation runs; of a conditional each branch."""
    runs: Counter[str] = Counter()
    stack = [(entry, 1)] if entry is not None else []
    while stack:  # no computation calls itself
        name, times = stack.pop()
        if name not in computations:
            continue
        runs[name] += times
        for line in computations[name][1]:
            called = _CALLED.findall(line)
            called += [one.strip().lstrip("%") for names in _CALLED_LISTS.findall(line) for one in names.split(",")]
            steps = _STEPS.search(line) if " while(" in line else None
            stack += [(one, times * (int(steps[1]) if steps else 1)) for one in called]
    return runs
