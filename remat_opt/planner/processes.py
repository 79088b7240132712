"""Several processes plan the same step: each plans for itself, and all arrive at the same schedule.

A search depends only on the graph and the budget, so that nothing has to be sent. The exception is a search with a time
limit, which may get further on one host than on another: process 0 searches and broadcasts the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable

import jax

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.search import SOLVERS, Problem, Solution
from remat_opt.trace import compat

WITH_TIME_LIMITS = frozenset({"milp"})
_LONGEST_WAIT_MS = 30 * 60 * 1000


def solve(solver: str, problem: Problem, budget: int | None) -> Solution:
    """What a search finds, in each process the same.

    Args:
        solver: its name.
        problem: the step.
        budget: bytes, or None for the least memory.
    """
    if solver not in WITH_TIME_LIMITS or jax.process_count() == 1:
        return SOLVERS[solver](problem, budget)
    key = f"remat_opt/{solver}/{budget}/{digest(problem.graph)}"
    found = broadcast_from_process_0(key, lambda: _to_text(SOLVERS[solver](problem, budget)))
    return problem.scheduled(_from_text(found), Choice())


def broadcast_from_process_0(key: str, make: Callable[[], str]) -> str:
    """A text that process 0 makes and all processes of the job read, through the service that connects them.

    Nothing here waits for a process but for process 0, which waits for none.

    Args:
        key: names the text; a second text of the same name is not made.
        make: makes it.

    Raises:
        RuntimeError: there is no such service.
        jax.errors.JaxRuntimeError: process 0 does not make it in time; it has to plan the same steps.
    """
    client = compat.distributed_client()
    if client is None:
        raise RuntimeError(
            f"expected processes that jax.distributed.initialize() has connected, to tell the others {key!r}, found "
            f'{jax.process_count()} that are not; write optimize(..., solver="auto"), which needs no connection'
        )
    if jax.process_index() != 0:
        return client.blocking_key_value_get(key, _LONGEST_WAIT_MS)
    text = make()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is there already: that one counts
        client.key_value_set(key, text)
    return client.blocking_key_value_get(key, _LONGEST_WAIT_MS)


def digest(graph: Graph) -> str:
    """A hexadecimal SHA-256 of a graph."""
    parts = (graph.sizes, graph.ops, graph.inputs, graph.outputs, graph.aliases, sorted(graph.constants), graph.fused)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _to_text(solution: Solution) -> str:
    return json.dumps([[run.recomputed, run.ops] for run in solution.schedule.runs])


def _from_text(text: str) -> Schedule:
    return Schedule(tuple(Run(tuple(ops), recomputed) for recomputed, ops in json.loads(text)))
