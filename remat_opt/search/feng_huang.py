"""Optimal checkpoints of linear and of arbitrary graphs: Feng & Huang 2018-2021 (arXiv:1808.00079, algorithms 1 to 5).

Objective: bytes of the checkpoints + the most bytes recomputed between them, over the segments that they divide the
graph into. For each possible second term C (a *max term*) the first is made least:

- a linear graph: the shortest path from source to target over the steps j → k with at most C bytes strictly between,
  where a vertex on the path costs its bytes. Optimal.
- an arbitrary graph, by its division tree (`division_tree.py`): in a linear node a child that costs more than C makes
  both its ends checkpoints and is divided in its turn; the runs between are linear graphs. In any other node all joints
  are checkpoints, and the children that cost more than C are divided.

Not all max terms are tried: the first term falls as C rises, so that between two values of C both terms are bounded
from below, and most intervals are left out unseen, without loss. A shortest path takes linear time with a sliding
minimum, since steps only grow.

`solve` adds a virtual source and target to the forward graph, so that any number of inputs and outputs will do, and
simulates the best checkpoint sets by this objective and some of smaller C, which save more: the objective only guides.
Segments begin behind the checkpoints, or are the connected parts that the checkpoints leave, whichever is better.

Limitations: the objective knows no cotangents, and no time; one level of recomputation; general nodes save all their
joints, which is far from the optimum where many vertices are read from everywhere (dense blocks whose concatenations
are fused away); linear nodes with more than `MOST_PAIRS` pairs try evenly spaced max terms; what is made before the
forward/backward boundary of `forward.py` only.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from remat_opt.search.division_tree import Division, Edge, Node, divide
from remat_opt.search.forward import Forward, forward_part
from remat_opt.search.problem import Problem, Solution, memory_first
from remat_opt.search.stages import best_of

MOST_PAIRS = 4_000_000
_EVENLY_SPACED = 65_536
_SIMULATED = 8
_CONSIDERED = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoints:
    """A set of checkpoints with the two terms of its objective, in bytes."""

    vertices: tuple[int, ...]
    bytes: int
    max_term: int

    @property
    def objective(self) -> int:
        """Bytes of the checkpoints, and the bound of what is recomputed."""
        return self.bytes + self.max_term


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    plain = problem.plain
    if budget is not None and plain.peak <= budget:
        return plain
    forward = forward_part(problem)
    if not len(forward):
        return plain
    schedules: _Schedules = problem.cached("feng_huang", lambda: _Schedules(forward))
    tried = (*schedules.search.best(_SIMULATED), *schedules.search.saving_more(_SIMULATED))
    return best_of(problem, map(schedules.of, tried), budget)


class _Schedules:
    """The simulated schedule of each set of checkpoints; none is simulated twice."""

    def __init__(self, forward: Forward):
        self.forward = forward
        edges, sizes = with_ends(forward)
        self.search = _Search(divide(edges, sizes), sizes)
        self.known: dict[tuple[int, ...], Solution] = {(): forward.problem.plain}

    def of(self, checkpoints: Checkpoints) -> Solution:
        """The better schedule for a set of checkpoints: cuts behind them, or the connected parts between."""
        if checkpoints.vertices not in self.known:
            found = _schedules(self.forward, [vertex - 1 for vertex in checkpoints.vertices])
            self.known[checkpoints.vertices] = min(found, key=memory_first)
        return self.known[checkpoints.vertices]


def _spread(items: Sequence, most: int) -> list:
    """At most `most` items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def with_ends(forward: Forward) -> tuple[list[Edge], list[int]]:
    """Edges and bytes of the forward graph with a virtual source and target; vertex i becomes i + 1."""
    count = len(forward)
    edges = [(one + 1, vertex + 1) for one, vertex in tied(forward)]
    begun, read = {b for _, b in edges}, {a for a, _ in edges}
    edges += [(0, vertex) for vertex in range(1, count + 1) if vertex not in begun]
    edges += [(vertex, count + 1) for vertex in range(1, count + 1) if vertex not in read]
    return edges, [0, *forward.sizes, 0]


def tied(forward: Forward) -> list[Edge]:
    """The edges of the forward graph, with others that tie its loose ends to their neighbourhood.

    A mask from random bits has no predecessor, and what only the backward reads has no successor; an edge to a virtual
    source or target would pass by everything. A vertex without predecessors is tied to the nearest vertex before it
    that it or its reader depends on, and one without successors to the nearest behind it that depends on it or on what
    it is made from; where there is none it is an input or an output.
    """
    count = len(forward)
    successors: list[list[int]] = [[] for _ in range(count)]
    followers: dict[int, int] = {}  # the first vertex that depends on one through saved values
    for vertex, before in enumerate(forward.predecessors):
        followers.setdefault(forward.nearest[vertex], vertex)
        for one in before:
            successors[one].append(vertex)
    edges = [(one, vertex) for vertex, before in enumerate(forward.predecessors) for one in before]
    for vertex, before in enumerate(forward.predecessors):
        if not before:
            one = forward.nearest[vertex] if forward.nearest[vertex] >= 0 else min(successors[vertex], default=-1)
            while one > vertex:
                one = max((other for other in forward.predecessors[one] if other != vertex), default=-1)
            edges += [(one, vertex)] if one >= 0 else []
        if not successors[vertex]:
            one = followers.get(vertex, max(before, default=count))
            while one < vertex:
                one = min((other for other in successors[one] if other != vertex), default=count)
            edges += [(vertex, one)] if one < count else []
    return edges


def checkpoints_of_chain(sizes: Sequence[int]) -> Checkpoints:
    """The optimal checkpoints of a chain: vertex 0 is the source and the last one the target, neither a checkpoint."""
    return checkpoints_of_graph([(index, index + 1) for index in range(len(sizes) - 1)], sizes)


def checkpoints_of_graph(edges: Sequence[Edge], sizes: Sequence[int]) -> Checkpoints:
    """The checkpoints of a graph by its division tree (see `divide` for the arguments)."""
    return _Search(divide(edges, sizes), sizes).best(1)[0]


class _Search:
    """The least checkpoints for each max term."""

    def __init__(self, tree: Node, sizes: Sequence[int]):
        self.tree = tree
        self.sizes = sizes
        self.terms = max_terms(tree, sizes)
        self.known: dict[int, Checkpoints] = {}

    def least(self, max_term: int) -> Checkpoints:
        """The checkpoints of the tree where at most `max_term` bytes may be recomputed at once."""
        if max_term not in self.known:
            chosen: list[int] = []
            stack = [self.tree] if self.tree.cost > max_term else []
            while stack:
                node = stack.pop()
                chosen += node.joints if node.division is not Division.LINEAR else self._linear(node, max_term)
                stack += [child for child in node.children if child.cost > max_term]
            vertices = tuple(sorted(chosen))
            total = sum(self.sizes[vertex] for vertex in vertices)
            self.known[max_term] = Checkpoints(vertices, total, max_term)
        return self.known[max_term]

    def _linear(self, node: Node, max_term: int) -> list[int]:
        """Checkpoints of a linear node: the ends of its expensive children, and shortest paths between those."""
        chosen: list[int] = []
        run: list[Node] = []
        for child in node.children:
            if child.cost <= max_term:
                run.append(child)
                continue
            chosen += self._path(run, max_term)
            chosen += [child.source, child.target]
            run = []
        chosen += self._path(run, max_term)
        return sorted(set(chosen) - {node.source, node.target})

    def _path(self, run: Sequence[Node], max_term: int) -> list[int]:
        """The shortest path over a run of children, without its ends."""
        if not run:
            return []
        vertices = [run[0].source, *(child.target for child in run)]
        passed = 0  # bytes up to and with a vertex, the first one's left out
        totals = [0]
        weight, came = [0], [0]
        window: collections.deque[int] = collections.deque([0])  # candidates for the step before, the cheapest first
        for index, child in enumerate(run, start=1):
            passed += child.cost
            while passed - totals[window[0]] > max_term:
                window.popleft()
            came.append(window[0])
            weight.append(weight[window[0]] + self.sizes[vertices[index]])
            passed += self.sizes[vertices[index]]
            totals.append(passed)
            while window and weight[window[-1]] > weight[index]:
                window.pop()
            window.append(index)
        path: list[int] = []
        index = came[-1]
        while index:
            path.append(vertices[index])
            index = came[index]
        return path

    @functools.cached_property
    def promising(self) -> list[Checkpoints]:
        """The checkpoints of enough max terms to hold the least objective, by branch and bound."""
        intervals = [(0, len(self.terms) - 1)]
        best = min(self.least(self.terms[index]).objective for index in intervals[0])
        while intervals:
            low, high = intervals.pop()
            if high - low < 2:
                continue
            bound = self.least(self.terms[high]).bytes + self.terms[low + 1]
            if bound >= best or self.least(self.terms[low]).bytes == self.least(self.terms[high]).bytes:
                continue
            middle = (low + high) // 2
            best = min(best, self.least(self.terms[middle]).objective)
            intervals += [(low, middle), (middle, high)]
        return [self.known[term] for term in sorted(self.known)]

    def best(self, most: int) -> list[Checkpoints]:
        """The checkpoints with the least objectives."""
        return sorted(self.promising, key=lambda found: (found.objective, found.max_term))[:most]

    def saving_more(self, most: int) -> list[Checkpoints]:
        """Different checkpoints for some of the max terms below the best: more is saved, and less is recomputed."""
        below = _spread(self.terms[: self.terms.index(self.best(1)[0].max_term)], _CONSIDERED)
        different = {found.vertices: found for found in map(self.least, below)}
        return _spread(list(different.values()), most)


def max_terms(tree: Node, sizes: Sequence[int]) -> list[int]:
    """All sums of bytes that may have to be recomputed between two neighbouring checkpoints, sorted, each once."""
    terms = {0, tree.cost}
    for node in tree.walk():
        if node.division is Division.LINEAR:
            terms.update(_linear_terms(node, sizes))
        else:
            terms.update(child.cost for child in node.children)
    return sorted(terms)


def _linear_terms(node: Node, sizes: Sequence[int]) -> list[int]:
    """Bytes strictly between any two joints or ends of a linear node."""
    joints = np.array([0, *(sizes[child.target] for child in node.children[:-1]), 0], dtype=np.int64)
    between = np.array([child.cost for child in node.children], dtype=np.int64)
    upto = np.concatenate([[0], np.cumsum(joints[1:] + between)])  # with each joint, the first one's left out
    if len(joints) * (len(joints) - 1) // 2 > MOST_PAIRS:
        return np.unique(np.linspace(int(between.max()), node.cost, _EVENLY_SPACED).astype(np.int64)).tolist()
    low, high = np.triu_indices(len(joints), 1)
    return np.unique(upto[high] - joints[high] - upto[low]).tolist()


def _schedules(forward: Forward, checkpoints: Sequence[int]) -> tuple[Solution, Solution]:
    """Schedules with cuts behind the checkpoints, and with the connected parts between them as blocks."""
    place = {op: position for position, op in enumerate(forward.problem.order[: forward.forward_end])}
    cuts = [place[forward.ops[vertex]] + 1 for vertex in checkpoints]
    block = _connected_parts(forward, checkpoints)
    last = {block[vertex] for vertex in range(checkpoints[-1] + 1, len(forward))}  # not evicted
    kept = {vertex for vertex in range(len(forward)) if block[vertex] in last}
    return forward.solution_of_cuts(checkpoints, cuts), forward.solution({*checkpoints, *kept}, block)


def _connected_parts(forward: Forward, checkpoints: Sequence[int]) -> list[int]:
    """For each vertex the last vertex of its connected part when the checkpoints are taken out; a checkpoint is its
    own."""
    leader = list(range(len(forward)))

    def find(vertex: int) -> int:
        while leader[vertex] != vertex:
            leader[vertex] = leader[leader[vertex]]
            vertex = leader[vertex]
        return vertex

    without = set(checkpoints)
    for edge in tied(forward):
        if without.isdisjoint(edge):
            low, high = sorted(map(find, edge))
            leader[low] = high
    return [find(vertex) for vertex in range(len(forward))]
