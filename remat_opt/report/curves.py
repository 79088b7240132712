"""The curve of live memory over the time of a step, for the text and for the picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness
from remat_opt.graph.schedule import Schedule
from remat_opt.graph.transfers import host_live

_BLOCKS = " ▁▂▃▄▅▆▇█"
_RECOMPUTING = "━"


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """Bytes live at each position of a schedule (see `Liveness`), with the estimated time at which it is reached.

    Attributes:
        begins: seconds from the step's begin, one for each position, and the end of the last one.
        live: bytes live at each position.
        recomputed: whether each position belongs to a recomputed run.
    """

    begins: np.ndarray
    live: np.ndarray
    recomputed: np.ndarray

    @property
    def seconds(self) -> float:
        """Estimated time of the whole step."""
        return float(self.begins[-1])

    @property
    def peak(self) -> int:
        """The most bytes live at one moment."""
        return int(self.live.max(initial=0))

    @property
    def peak_seconds(self) -> float:
        """When the peak is first reached."""
        return float(self.begins[int(self.live.argmax())])

    def share(self, parts: int) -> Curve:
        """The curve of one of so many devices, which share bytes and time equally."""
        return self if parts == 1 else Curve(self.begins / parts, self.live // parts, self.recomputed)


def curve_of(graph: Graph, schedule: Schedule, liveness: Liveness) -> Curve:
    """Put a simulated schedule on a time axis, by the ops' estimated seconds (all alike where those are not known)."""
    durations: list[float] = []
    recomputed: list[bool] = []
    for run in schedule.runs:
        durations.extend([0.0] * run.recomputed)  # the barrier
        durations.extend(graph.ops[op].seconds for op in run.ops)
        recomputed.extend([run.recomputed] * (len(run.ops) + run.recomputed))
    if len(durations) + 1 != len(liveness.live):
        raise ValueError(
            f"expected the liveness of this schedule, with {len(durations) + 1} positions; got {len(liveness.live)}"
        )
    return Curve(_begins(durations), np.asarray(liveness.live), np.array([*recomputed, False]))


def host_curve(graph: Graph, schedule: Schedule, loops: Mapping[int, int]) -> Curve:
    """Bytes in the host's memory over the same time; its positions are the ops and the return, without barriers.

    Args:
        graph: the step.
        schedule: whose transfers are counted.
        loops: bytes of the stacks that loops put into the host's memory for another loop, by value.
    """
    live, order = host_live(graph, schedule), schedule.order
    place = {op: at for at, op in reversed([*enumerate(order)])}  # of an op's first run
    for value, size in loops.items():
        readers = [place[user] for user in graph.users[value]]
        live[place[graph.producer[value]] : max(readers, default=len(order) - 1) + 1] += size
    return Curve(_begins([graph.ops[op].seconds for op in order]), live, np.zeros(len(live), dtype=bool))


def _begins(durations: Sequence[float]) -> np.ndarray:
    """When each position begins, the return among them, and the end of that."""
    lengths = np.array([*durations, 0.0])
    if not lengths.sum():
        lengths = np.ones(len(lengths))
    return np.concatenate([[0.0], np.cumsum(lengths)])


def draw(curve: Curve, *, width: int, height: int, seconds: float, top: int) -> list[str]:
    """The curve as lines of blocks, the highest first, with the bytes on an axis at the left.

    Args:
        curve: what to draw.
        width: characters that stand for `seconds`, without the axis.
        height: lines that stand for `top`.
        seconds: the time at the right end; a shorter curve stops before.
        top: the bytes at the upper end.

    Returns:
        A line that marks the peak, `height` lines, and one that underlines what is recomputed (none where nothing is).
    """
    columns = max(1, round(width * curve.seconds / seconds)) if seconds else width
    highest, recomputing = _columns(curve, columns)
    eighths = [math.ceil(8 * height * int(value) / top) if top else 0 for value in highest]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_BLOCKS[min(8, max(0, eighth - 8 * row))] for eighth in eighths)
        lines.append(cells.rstrip())
    peak = int(highest.argmax())
    underline = "".join(_RECOMPUTING if again else " " for again in recomputing).rstrip()
    return [" " * peak + "▼", *lines, *([underline] if underline else [])]


def _columns(curve: Curve, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `count` equal spans of time the most bytes live, and whether most of its time is recomputation."""
    edges = np.linspace(0.0, curve.seconds, count + 1)
    begins, ends = curve.begins[:-1], curve.begins[1:]
    spent = np.concatenate([[0.0], np.cumsum((ends - begins) * curve.recomputed)])
    again = np.interp(edges, curve.begins, spent)
    highest = np.zeros(count, dtype=np.int64)
    for column in range(count):
        first = min(int(np.searchsorted(ends, edges[column], "right")), len(begins) - 1)
        # positions that take no time belong to the column in which they begin
        last = len(begins) if column == count - 1 else int(np.searchsorted(begins, edges[column + 1], "left"))
        highest[column] = curve.live[first : max(last, first + 1)].max()
    return highest, np.diff(again) > 0.5 * np.diff(edges)
