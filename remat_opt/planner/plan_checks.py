"""What the text of a plan may hold: every field's type and range, checked before anything is made of it.

A plan file comes from outside, and its digests are no secret: whoever can write the file can write them. Nothing here
takes more time or memory than the text does: a range of operations stays a range until `Plan.schedule_for` compares it
with the program.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remat_opt.planner.budget import parse_budget
from remat_opt.targets.communication import Collectives
from remat_opt.targets.figures import Figures

MOST_OPERATIONS = 10**6  # of one step; the largest that are planned have a tenth of them

Check = Callable[[str, Any], None]
"""`check(name, value)` raises ValueError, naming the field, where the value is not what the field may hold."""


def expect(is_right: bool, name: str, expected: str, value: Any) -> None:
    """Raise ValueError with a field's name where its value is not right."""
    if not is_right:
        shown = repr(value) if isinstance(value, (bool, float, type(None))) else f"{type(value).__name__}"
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            shown = repr(value) if len(str(value)) < 40 else f"{shown} of {len(str(value))} characters"
        raise ValueError(f"{name}, expected {expected}, found {shown}")


def of_kind(expected: str, is_right: Callable[[Any], bool]) -> Check:
    """A check of single values, with what is expected in words."""
    return lambda name, value: expect(is_right(value), name, expected, value)


def is_finite(value: Any) -> bool:
    return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))


def whole(low: int = 0, high: int = 2**63 - 1) -> Check:
    """An integer from `low` to `high`, both included."""
    return of_kind(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


TEXT = of_kind("text", lambda value: type(value) is str)
FLAG = of_kind("true or false", lambda value: type(value) is bool)
MARK = of_kind("true, or no such field", lambda value: value is True)
NUMBER = of_kind("a finite number", is_finite)
SHARE = of_kind("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1)


def budget(name: str, value: Any) -> None:
    expect(type(value) in (int, float, str), name, "a budget", value)
    parse_budget(value)


def optional(check: Check) -> Check:
    """Null, or what another check accepts."""
    return lambda name, value: None if value is None else check(name, value)


def list_of(check: Check, length: int | None = None) -> Check:
    """A list whose items pass a check; of so many items where a length is given."""

    def check_list(name: str, value: Any) -> None:
        expect(type(value) is list, name, "a list", value)
        if length is not None and len(value) != length:
            raise ValueError(f"{name}, expected a list of {length}, found one of {len(value)}")
        of_item = f"{name}[]"
        for item in value:
            check(of_item, item)

    return check_list


def table_of(check: Check) -> Check:
    """An object whose values pass a check."""

    def check_table(name: str, value: Any) -> None:
        expect(type(value) is dict, name, "an object", value)
        for key, item in value.items():
            check(f"{name}.{key[:40]}", item)

    return check_table


def record(fields: Mapping[str, Check], left_out: Iterable[str] = ()) -> Check:
    """An object with these fields and no others, of which those in `left_out` may be missing."""
    may_be_missing = frozenset(left_out)

    def check_record(name: str, value: Any) -> None:
        expect(type(value) is dict, name, "an object", value)
        inside = f"{name}." if name else ""
        for missing in sorted(fields.keys() - value.keys() - may_be_missing):
            raise ValueError(f"{inside}{missing}, which is missing")
        for unknown in sorted(value.keys() - fields.keys()):
            raise ValueError(f"{inside}{unknown[:40]}, which is no field of a plan")
        for key, item in value.items():
            fields[key](f"{inside}{key}", item)

    return check_record


def figures_of(cls: type, left_out: Iterable[str] = ()) -> Check:
    """An object with the fields of a dataclass of numbers and texts; sizes and counts are at least 0."""
    of_type = {int: whole(), float: NUMBER, str: TEXT, bool: FLAG, Collectives: COLLECTIVES}

    def check_of(hint: Any) -> Check:
        if isinstance(hint, types.UnionType):
            (inner,) = (one for one in typing.get_args(hint) if one is not type(None))
            return optional(of_type[inner])
        return of_type[hint]

    return record({name: check_of(hint) for name, hint in typing.get_type_hints(cls).items()}, left_out)


COLLECTIVES = record(
    {**dict.fromkeys(("arrays", "gathers", "bytes"), whole()), "recomputed": list_of(list_of(whole()))},
    left_out=("gathers", "bytes"),
)
FIGURES = figures_of(Figures, left_out=("compiler", "note", "collectives", "host_temp_bytes"))
_IDS = list_of(whole(0, 2**31))
_CHUNKS = record({"number": whole(1, 2**31), "steps": whole(1, 2**31), "in_chunk": _IDS})
_LOOP = record(
    {
        "pair": whole(0, 2**31),
        "saved": _IDS,
        "chunk": optional(whole(1, 2**31)),
        "in_chunk": _IDS,
        "update": FLAG,
        "earlier": list_of(_CHUNKS),
        "step_bytes": optional(whole()),
        "host": _IDS,
    },
    left_out=("earlier", "step_bytes", "host"),
)
_TIMING = record({"what": TEXT, "seconds": NUMBER, "physical_peak_bytes": whole(), "is_taken": FLAG})
_RANGE = list_of(whole(0, MOST_OPERATIONS), length=2)


def document(schema: int, predicted: type) -> Check:
    """A whole plan.

    Args:
        schema: the number that the text bears.
        predicted: the dataclass of the models' figures.
    """
    return record(
        {
            "schema": whole(schema, schema),
            **dict.fromkeys(("fingerprint", "target", "solver", "note", "saved_digest", "schedule_digest"), TEXT),
            **dict.fromkeys(("inputs", "saved"), list_of(TEXT)),
            "equations": whole(),
            "budget": optional(budget),
            "choice": record(dict.fromkeys(("saved", "turning_points", "cuts"), _IDS)),
            "schedule": list_of(record({"recomputed": FLAG, "ops": list_of(_RANGE)})),
            "predicted": figures_of(predicted, left_out=("host_bytes", "stall_seconds")),
            **dict.fromkeys(("measured", "plain_measured"), optional(FIGURES)),
            "versions": table_of(TEXT),
            "loops": list_of(_LOOP),
            "loop_bodies": whole(),
            "inside_loops": optional(SHARE),
            **dict.fromkeys(("gathers_once", "rewritten", "in_our_order"), MARK),
            "chunks": whole(2, 2**31),
            "transfers": list_of(record(dict.fromkeys(("gone", "back", "value"), whole(0, 2**31)))),
            "timings": list_of(_TIMING),
        },
        left_out=("gathers_once", "rewritten", "in_our_order", "chunks", "transfers", "timings"),
    )


Ranges = Sequence[tuple[int, int]]
"""Operations by their numbers: the first and the count of consecutive ones."""


def check_runs(runs: Iterable[tuple[Ranges, bool]], operations: int | None = None) -> int:
    """Check ranges of operations without listing them.

    Args:
        runs: the ranges of each run, and whether it is recomputed.
        operations: of the program; None where it is not known yet.

    Returns:
        How many operations there are.

    Raises:
        ValueError: the runs that are not recomputed do not have each operation once, others have operations that are
            not there, or all of them together are too many.
    """
    runs = list(runs)
    first = sorted(one for ranges, recomputed in runs if not recomputed for one in ranges)
    count = 0
    for begin, length in first:
        if begin != count or length < 1:
            raise ValueError(f"schedule, which does not run operation {min(begin, count)} once before it recomputes")
        count += length
    if count > MOST_OPERATIONS or (operations is not None and count != operations):
        expected = f"{operations}, as the program has" if operations is not None else f"at most {MOST_OPERATIONS}"
        raise ValueError(f"schedule, expected {expected} operations, found {count}")
    again = [one for ranges, recomputed in runs if recomputed for one in ranges]
    for begin, length in again:
        if length < 1 or begin + length > count:
            raise ValueError(f"schedule, which recomputes {length} operations from {begin} on, of {count} in all")
    total = count + sum(length for _, length in again)
    if total > most_runs(count):
        raise ValueError(f"schedule, expected at most {most_runs(count)} runs of {count} operations, found {total}")
    return count


def most_runs(operations: int) -> int:
    """How often all operations of a step together may run: each as often as there are operations, in long steps a
    hundred times on average. No search repeats as much."""
    return min(operations * (operations + 1), max(MOST_OPERATIONS, 100 * operations))
