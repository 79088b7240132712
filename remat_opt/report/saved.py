"""Which tensors a plan saves, and why each of them."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence

from remat_opt.graph.graph import Graph, Kind
from remat_opt.plan import Plan

_NUMBER = re.compile(r"\d+")


class Reason(enum.Enum):
    """Why a tensor is saved; the value is the sentence that reports print."""

    CROSSES_A_CUT = "crossing a cut: read again when a later segment is recomputed"
    DEAR = "dear to recompute: results of products, convolutions and the like inside a segment"
    READ_AT_THE_END = "read behind the last cut, by the part of the step that runs only once"
    NOT_REPEATABLE = "made by an operation that must not run twice"
    INSIDE = "made inside a segment and read later: kept rather than made again"


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


def saved_groups(plan: Plan, graph: Graph, names: Mapping[int, str]) -> list[Group]:
    """The saved tensors in groups, those with the most bytes first."""
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
    """Why each saved value is kept, read off the schedule: who reads it, and in which segment."""
    first_runs = [op for run in plan.schedule.runs if not run.recomputed for op in run.ops]
    position = {op: at for at, op in enumerate(first_runs)}
    cuts = sorted({*plan.choice.cuts, *plan.choice.turning_points})
    segment = {op: bisect.bisect_right(cuts, at) for op, at in position.items()}
    again = frozenset(plan.schedule.recomputed)

    def reason(value: int) -> Reason:
        maker = graph.producer[value]
        if maker >= 0 and not graph.ops[maker].repeatable:
            return Reason.NOT_REPEATABLE
        made_in = segment.get(maker, -1)
        if any(user in again and segment[user] > made_in for user in graph.users[value]):
            return Reason.CROSSES_A_CUT
        if maker >= 0 and graph.ops[maker].kind in (Kind.CONTRACTION, Kind.OPAQUE):
            return Reason.DEAR
        read_in_segment = any(user in again for user in graph.users[value])
        return Reason.INSIDE if read_in_segment else Reason.READ_AT_THE_END

    return {value: reason(value) for value in values}


def _flops_of(graph: Graph, values: Sequence[int]) -> float:
    makers = {graph.producer[value] for value in values if graph.producer[value] >= 0}
    return sum(graph.ops[op].flops for op in makers)


def join_names(names: Sequence[str]) -> str:
    """Names that differ in numbers only as one: block1/relu and block2/relu → block{1-2}/relu."""
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
