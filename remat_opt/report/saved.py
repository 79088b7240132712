"""Which tensors a plan saves, and why each of them."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence

from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.liveness import Liveness
from remat_opt.planner.plan import Plan

_NUMBER = re.compile(r"\d+")
_DRAWS = ("random_", "rng_", "threefry")  # how primitives that make keys and random bits are called


class Reason(enum.Enum):
    """Why a tensor is saved; the value is the sentence that reports print."""

    CROSSES_A_CUT = "crossing a cut: read again when a later segment is recomputed"
    EXPENSIVE = "expensive to recompute: results of products, convolutions and the like inside a recomputed segment"
    RANDOM = "random bits and keys inside a recomputed segment, kept rather than drawn again"
    INSIDE = "from inside a recomputed segment, kept rather than made again"
    NOT_RECOMPUTED = "from parts of the step that are not recomputed, for their own backward"
    NOT_REPEATABLE = "made by an operation that must not run twice"


@dataclasses.dataclass(frozen=True)
class Group:
    """Saved tensors of the same size, saved for the same reason, with names that differ in numbers only.

    Attributes:
        name: the name; numbers that vary are written as `{1-3,5}`.
        count: how many there are.
        size: bytes of each.
        reason: why they are saved.
        flops: FLOPs of the operations that made them, all together.
    """

    name: str
    count: int
    size: int
    reason: Reason
    flops: float

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.count * self.size


def held_values(plan: Plan, liveness: Liveness, values: Iterable[int]) -> list[int]:
    """The saved values that are live when a recomputed run begins.

    The others cost nothing: they are fused into their readers, returned by the step, or read for the last time before
    anything is recomputed.
    """
    begins = []
    position = 0
    for run in plan.schedule.runs:
        if run.recomputed:
            begins.append(position)
        position += len(run.ops) + run.recomputed
    wanted = set(values)
    held = set()
    for buffer in liveness.buffers:
        if buffer.value in wanted and buffer.size:
            following = bisect.bisect_left(begins, buffer.birth)
            if following < len(begins) and begins[following] <= buffer.death:
                held.add(buffer.value)
    return sorted(held)


def saved_groups(plan: Plan, graph: Graph, names: Mapping[int, str]) -> list[Group]:
    """Group similar saved tensors; the groups with the most bytes come first."""
    reasons = reasons_of(plan, graph, names)
    together: dict[tuple[str, int, Reason], list[int]] = {}
    for value in sorted(names):
        key = (_NUMBER.sub("*", names[value]), graph.sizes[value], reasons[value])
        together.setdefault(key, []).append(value)
    groups = [
        Group(join_names([names[v] for v in values]), len(values), size, reason, _flops_of(graph, values))
        for (_, size, reason), values in together.items()
    ]
    return sorted(groups, key=lambda group: (-group.total, group.name))


def reasons_of(plan: Plan, graph: Graph, values: Iterable[int]) -> dict[int, Reason]:
    """Why each saved value is saved. The schedule tells: who reads the value, and in which segment."""
    first_runs = [op for run in plan.schedule.runs if not run.recomputed for op in run.ops]
    position = {op: at for at, op in enumerate(first_runs)}
    cuts = sorted({*plan.choice.cuts, *plan.choice.boundaries})
    segment = {op: bisect.bisect_right(cuts, at) for op, at in position.items()}
    again = frozenset(plan.schedule.recomputed)
    recomputed_segments = {segment[op] for op in again}

    def reason(value: int) -> Reason:
        maker = graph.producer[value]
        if maker >= 0 and not graph.ops[maker].repeatable:
            return Reason.NOT_REPEATABLE
        made_in = segment.get(maker, -1)
        if any(user in again and segment[user] > made_in for user in graph.users[value]):
            return Reason.CROSSES_A_CUT
        if made_in not in recomputed_segments:
            return Reason.NOT_RECOMPUTED
        if graph.ops[maker].name.startswith(_DRAWS):
            return Reason.RANDOM
        return Reason.EXPENSIVE if graph.ops[maker].kind in (Kind.CONTRACTION, Kind.OPAQUE) else Reason.INSIDE

    return {value: reason(value) for value in values}


def _flops_of(graph: Graph, values: Sequence[int]) -> float:
    makers = {graph.producer[value] for value in values if graph.producer[value] >= 0}
    return sum(graph.ops[op].flops for op in makers)


def join_names(names: Sequence[str]) -> str:
    """Join names that differ only in numbers: block1/relu and block2/relu → block{1-2}/relu."""
    texts = _NUMBER.split(names[0])
    columns = [set(column) for column in zip(*(_NUMBER.findall(name) for name in names), strict=True)]
    numbers = [min(column) if len(column) == 1 else _ranges(sorted(map(int, column))) for column in columns]
    return texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans) + "}"
