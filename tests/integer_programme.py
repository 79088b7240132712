"""Checkmate's integer programme over one step, in the terms of our liveness model (see `milp.py`).

Ops are numbered by their place in the order of first runs. Stage t is op t's first run and the repeats just before it.
Variables, all between 0 and 1, only the first of them integers:

- run[t, i]: op i runs again in stage t > i;
- resident[t, v]: value v is there at the start of stage t, to be read in it or later;
- needed[t, k, v]: value v is read in stage t by op k or behind it, or is resident in stage t + 1;
- some for what the step returns, whose last copy is free (see `_Results`).

Checkmate counts what is allocated and subtracts what is freed. Here a value is counted where it is live, as
`liveness.simulate` counts it: at moment (t, k) it is `resident` before its op's place in the stage, made or resident at
that place, `needed` behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_opt.search.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A linear expression of few variables: a constant and (variable, factor) pairs."""

    constant: float = 0.0
    parts: tuple[tuple[int, float], ...] = ()

    def __add__(self, other: Term) -> Term:
        return Term(self.constant + other.constant, self.parts + other.parts)

    def times(self, factor: float) -> Term:
        return Term(self.constant * factor, tuple((variable, part * factor) for variable, part in self.parts))

    @property
    def is_zero(self) -> bool:
        return not self.parts and self.constant == 0


ZERO = Term()
ONE = Term(1.0)


class Programme:
    """Variables, rows `expression ≤ 0`, and the memory of each moment, in bytes."""

    def __init__(self, problem: Problem):
        graph, order = problem.graph, problem.order
        place = {op: index for index, op in enumerate(order)}
        self.ops = [graph.ops[op] for op in order]
        self.count = len(self.ops)
        self.sizes = graph.sizes
        self.inputs = frozenset(graph.inputs)
        self.outputs = frozenset(graph.outputs)
        self.given = {output: given for given, output in graph.aliases}
        self.producer = [place[op] if op >= 0 else -1 for op in graph.producer]
        self.readers = [tuple(sorted(place[user] for user in users)) for users in graph.users]
        self.integers = 0  # the first variables; all others are continuous
        self.variables = 0
        self.rows: list[Term] = []
        self.moments: list[Term] = []
        self._set_windows()
        self._add_runs()
        self._add_residents()
        self._add_needs()
        results = _Results(self)
        for stage in range(self.count):
            for op in range(stage + 1):
                if op == stage or (stage, op) in self.run:
                    self.moments.append(self._memory(stage, op) + results.memory(stage, op))

    def new(self) -> Term:
        """A new variable."""
        self.variables += 1
        return Term(0.0, ((self.variables - 1, 1.0),))

    def at_most(self, small: Term, large: Term) -> None:
        """Add the row small ≤ large, unless it says nothing."""
        row = small + large.times(-1.0)
        if row.parts and row.constant + sum(max(factor, 0.0) for _, factor in row.parts) > 0:
            self.rows.append(row)

    def runs(self, stage: int, op: int) -> Term:
        """Whether an op runs in a stage."""
        return ONE if op == stage else self.run.get((stage, op), ZERO)

    def live(self, stage: int, op: int, value: int) -> Term:
        """Whether a value is live while an op runs in a stage."""
        producer = self.producer[value]
        if producer > op:
            return self.resident.get((stage, value), ZERO)
        if producer == op:
            return ONE if op == stage else self.resident.get((stage, value), ZERO) + self.runs(stage, op)
        return self.need(stage, op, value)

    def need(self, stage: int, op: int, value: int) -> Term:
        """Whether a value is read in a stage by an op or behind it, or is resident in the next stage."""
        for reader in self.readers[value]:
            if op <= reader <= stage and (stage, reader, value) in self.needed:
                return self.needed[stage, reader, value]
        return self.resident.get((stage + 1, value), ZERO)

    def _set_windows(self) -> None:
        """The last stage in which each op can be of use, and each value can be read."""
        self.last_run = list(range(self.count))
        self.last_read = [-1] * len(self.sizes)
        for index in range(self.count - 1, -1, -1):
            op = self.ops[index]
            for value in op.outputs:
                self.last_read[value] = max((self.last_run[reader] for reader in self.readers[value]), default=-1)
            # To make again only what the step returns is of no use: its one copy is free.
            if op.repeatable and not self.outputs.issuperset(op.outputs):
                self.last_run[index] = max([index, *(self.last_read[value] for value in op.outputs)])

    def _add_runs(self) -> None:
        self.run: dict[tuple[int, int], Term] = {}
        for stage in range(self.count):
            for op in range(stage):
                if stage <= self.last_run[op]:
                    self.run[stage, op] = self.new()
        self.integers = self.variables

    def _add_residents(self) -> None:
        self.resident: dict[tuple[int, int], Term] = {}
        made = [value for op in self.ops for value in op.outputs]
        for value in made:
            for stage in range(self.producer[value] + 1, self.last_read[value] + 1):
                self.resident[stage, value] = self.new()
        for (stage, value), there in self.resident.items():
            producer = self.producer[value]
            again = self.runs(stage, producer)
            self.at_most(there + again, ONE)  # nobody makes what is there
            before = self.resident.get((stage - 1, value), ZERO)
            self.at_most(there, before + self.runs(stage - 1, producer))
            for reader in self.readers[value]:
                self.at_most(self.runs(stage, reader) if reader <= stage else ZERO, there + again)

    def _add_needs(self) -> None:
        self.needed: dict[tuple[int, int, int], Term] = {}
        for value, readers in enumerate(self.readers):
            if value in self.inputs:
                continue
            producer = self.producer[value]
            for stage in range(producer + 1, self.last_read[value] + 1):
                later = self.resident.get((stage + 1, value), ZERO)
                for reader in reversed([reader for reader in readers if reader <= stage]):
                    runs = self.runs(stage, reader)
                    if runs.is_zero:
                        continue
                    later = self._either(runs, later)
                    self.needed[stage, reader, value] = later
                self.at_most(self.resident[stage, value], later)  # what is there is there for somebody
        for (stage, op), runs in self.run.items():
            of_use = [self.need(stage, op, value) for value in self.ops[op].outputs]
            self.at_most(runs, sum(of_use, ZERO))

    def _either(self, one: Term, other: Term) -> Term:
        """An expression that is at least both, and at most 1."""
        if one.is_zero or other.is_zero or ONE in (one, other):
            return max(one, other, key=lambda term: (term.constant, len(term.parts)))
        both = self.new()
        self.at_most(one, both)
        self.at_most(other, both)
        return both

    def _memory(self, stage: int, op: int) -> Term:
        """Bytes live while an op runs, without what the step returns."""
        total = ZERO
        for value in (value for made in self.ops[: stage + 1] for value in made.outputs):
            if self.sizes[value] and value not in self.outputs:
                total += self.live(stage, op, value).times(self.sizes[value])
        return total


class _Results:
    """Bytes of what the step returns: none, but for a copy that is recomputed later, which is a buffer like any other,
    and for a result that waits in a buffer of its own until its donated argument has been read for the last time."""

    def __init__(self, programme: Programme):
        self.programme = programme
        made = [value for op in programme.ops for value in op.outputs if value in programme.outputs]
        self.results = [value for value in made if programme.sizes[value]]
        self.argument: dict[tuple[int, int, int], Term] = {}
        for given in sorted({programme.given[value] for value in self.results if value in programme.given}):
            self._add_argument(given)
        self.again: dict[tuple[int, int], Term] = {}
        for op in sorted({programme.producer[value] for value in self.results}):
            later = ZERO
            for stage in range(programme.count - 1, op - 1, -1):
                self.again[stage, op] = later  # in a later stage
                later = programme._either(programme.runs(stage, op) if stage > op else ZERO, later)

    def _add_argument(self, given: int) -> None:
        """Whether a donated argument is read in a stage by an op or behind it, or in a later stage."""
        programme = self.programme
        later = ZERO
        for stage in range(programme.count - 1, -1, -1):
            for op in range(stage, -1, -1):
                if op in programme.readers[given]:
                    later = programme._either(programme.runs(stage, op), later)
                self.argument[stage, op, given] = later

    def memory(self, stage: int, op: int) -> Term:
        """Bytes of results while an op runs."""
        total = ZERO
        for value in self.results:
            if self.programme.producer[value] <= stage:
                total += self._charge(stage, op, value).times(self.programme.sizes[value])
        return total

    def _charge(self, stage: int, op: int, value: int) -> Term:
        programme = self.programme
        producer = programme.producer[value]
        if stage == producer and op < producer:
            return ZERO
        lower: list[Term] = []
        again = self.again[stage, producer]
        if not again.is_zero:
            lower.append(programme.live(stage, op, value) + again + Term(-1.0))
        if value in programme.given:
            waits = self._waits(stage, op, programme.given[value], producer)
            for later in range(stage, programme.last_run[producer] + 1):
                if later > stage or op < producer:
                    waits += programme.runs(later, producer).times(-1.0) if later > producer else ZERO
            lower.append(waits)
        lower = [term for term in lower if not term.is_zero]
        if len(lower) == 1 and producer == programme.last_run[producer]:
            return lower[0]
        if not lower:
            return ZERO
        charge = programme.new()
        for term in lower:
            programme.at_most(term, charge)
        return charge

    def _waits(self, stage: int, op: int, given: int, producer: int) -> Term:
        """Whether the argument is read from here on; at the result's own birth, behind it."""
        if op != producer:
            return self.argument[stage, op, given]
        if op < stage:
            return self.argument[stage, op + 1, given]
        return self.argument[stage + 1, 0, given] if stage + 1 < self.programme.count else ZERO


def matrix(rows: Sequence[Term], variables: int):
    """Rows as a sparse matrix of scipy, and the upper bounds of `matrix @ x`."""
    from scipy.sparse import csr_array

    entries = [(row, variable, factor) for row, term in enumerate(rows) for variable, factor in term.parts]
    row, column, factor = zip(*entries, strict=True) if entries else ((), (), ())
    shape = (len(rows), variables)
    return csr_array((np.array(factor, float), (np.array(row, int), np.array(column, int))), shape), np.array(
        [-term.constant for term in rows]
    )
