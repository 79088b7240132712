"""What searches keep: answers of a method, as long as its object; problems, for equal graphs that come later."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from remat_opt.graph.graph import Graph
from remat_opt.search.problem import Problem

MOST_OPS = 2_000  # of all problems that are kept: 100 to 500 MB, since each op takes 50 to 250 kB

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """Cache the results of a method for each object and positional arguments.

    `functools.cache` on a method would keep every object alive, with its graph and schedules.
    """
    name = f"_answers_of_{getattr(method, '__name__', '')}"

    @functools.wraps(method)
    def ask(self: Any, *arguments: Hashable) -> Any:
        known = self.__dict__.setdefault(name, {})
        if arguments not in known:
            known[arguments] = method(self, *arguments)
        return known[arguments]

    return ask  # type: ignore[return-value]


class RecentProblems:
    """The problems of the last graphs, with all that was searched for them.

    A step that is planned again, for another budget, after `frontier` or in a cell of a notebook that is run again, has
    a graph that is equal. So have the bodies of loops, in all forms of a step.

    Args:
        most_ops: the oldest problems are dropped where the graphs of all have more ops.
    """

    def __init__(self, most_ops: int = MOST_OPS):
        self.most_ops = most_ops
        self._problems: dict[Hashable, Problem] = {}  # the last that was asked for comes last
        self._lock = threading.Lock()

    def of(self, graph: Graph, host_bandwidth: float | None = None) -> Problem:
        """The problem of a graph; see `Problem`."""
        key = (host_bandwidth, *(getattr(graph, field.name) for field in dataclasses.fields(Graph)))
        with self._lock:
            problem = self._problems.pop(key, None) or Problem(graph, host_bandwidth=host_bandwidth)
            self._problems[key] = problem
            ops = sum(len(one.graph.ops) for one in self._problems.values())
            while ops > self.most_ops:
                ops -= len(self._problems.pop(next(iter(self._problems))).graph.ops)
            return problem

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._problems.clear()


recent_problems = RecentProblems()
