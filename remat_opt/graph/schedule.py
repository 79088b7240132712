"""A schedule: the order of ops with their repeats. It is the one thing that is simulated and that is written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from remat_opt.graph.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Ops that run one after another.

    A *recomputed* run repeats ops that ran before. It waits, by a barrier, for every value that was made since the
    recomputed run before it and is still to be read; that is what keeps a compiler from doing it early.
    """

    ops: tuple[int, ...]
    recomputed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A value's way to the host's memory and back. Places are indices in `Schedule.order`.

    The copy out begins when the value has been made; of a value that goes again, it is there already. Nothing reads the
    value between `gone` and `back`.

    Attributes:
        gone: the copy out is done before this op runs, and the buffer is free.
        back: the copy back begins before this op runs, into a buffer of its own.
        value: the value.
    """

    gone: int
    back: int
    value: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The runs of a whole step. Every op of the graph stands in exactly one run that is not recomputed.

    Attributes:
        runs: in order.
        transfers: values that are in the host's memory for a time, by the places where they go.
    """

    runs: tuple[Run, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """All ops as they run, repeats included."""
        return tuple(itertools.chain.from_iterable(run.ops for run in self.runs))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is recomputed and nothing goes to the host."""
        return not self.transfers and not any(run.recomputed for run in self.runs)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The ops that run again, in order, once for each repeat."""
        return tuple(itertools.chain.from_iterable(run.ops for run in self.runs if run.recomputed))

    def extra_flops(self, graph: Graph) -> float:
        """FLOPs of all repeats."""
        return float(graph.op_flops[self._recomputed].sum())

    def extra_seconds(self, graph: Graph) -> float:
        """Estimated seconds of all repeats."""
        return float(graph.op_seconds[self._recomputed].sum())

    @property
    def _recomputed(self) -> np.ndarray:
        return np.fromiter(self.recomputed, dtype=np.int64)


def save_everything(graph: Graph) -> Schedule:
    """The program as it was written: every op once, in program order."""
    return Schedule((Run(tuple(range(len(graph.ops)))),))


def join_runs(runs: Iterable[Run]) -> Schedule:
    """A schedule without empty runs, neighbouring first runs made one."""
    joined: list[Run] = []
    for run in runs:
        if not run.ops:
            continue
        if joined and not run.recomputed and not joined[-1].recomputed:
            joined[-1] = Run(joined[-1].ops + run.ops)
        else:
            joined.append(run)
    return Schedule(tuple(joined))
