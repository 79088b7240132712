"""The division tree of a graph: Feng & Huang 2018-2021 (arXiv:1808.00079, "Optimal Gradient Checkpoint Search for
Arbitrary Computation Graphs", section 4), in bytes and without chance.

An *independent segment* [a, b] holds a, b and vertices on paths between them of which none has a neighbour outside: it
can be recomputed from a alone. The tree divides a graph with one source and one target into such segments:

1. *linear*: a vertex splits the graph when every edge lies before it or behind it. The graph is cut at all of them.
2. *branches*: an edge from source to target, and each connected part of what lies between them, is a segment.
3. *general*: the largest independent segments between all pairs of vertices with more than two edges, the source and
   the target, but of that pair itself; those with most edges first, as long as they share none.

`Node.interior` are the vertices strictly between a segment's ends; `Node.cost` is their bytes.

Where the segments of step 3 leave edges over, each of those becomes a segment of its own; the authors' program gives up
there. (Every edge lies on a chain between two vertices of step 3, which is an independent segment, but the greedy
choice may have taken a part of it.)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

Edge = tuple[int, int]


class Division(enum.Enum):
    """How a segment was divided."""

    LEAF = "leaf"
    LINEAR = "linear"
    BRANCHES = "branches"
    GENERAL = "general"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A segment from `source` to `target` and what it was divided into.

    Attributes:
        source: the vertex that the segment is recomputed from.
        target: the vertex at its end.
        interior: the vertices strictly between.
        edges: all edges of the segment, sorted.
        division: how it was divided.
        children: segments that share its edges among them; those of a linear node from source to target.
        cost: bytes of the interior.
    """

    source: int
    target: int
    interior: tuple[int, ...]
    edges: tuple[Edge, ...]
    division: Division
    children: tuple[Node, ...]
    cost: int

    @property
    def joints(self) -> tuple[int, ...]:
        """The vertices at which the segment was divided, without its own ends."""
        ends = {end for child in self.children for end in (child.source, child.target)}
        return tuple(sorted(ends - {self.source, self.target}))

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


def divide(edges: Sequence[Edge], sizes: Sequence[int]) -> Node:
    """The division tree of a graph.

    Args:
        edges: pairs (a, b) with a < b. Vertex 0 is the source and the last one the target; each vertex lies on a path
            between them.
        sizes: bytes of each vertex.
    """
    return _divide(0, len(sizes) - 1, sorted(set(edges)), sizes)


def _divide(source: int, target: int, edges: list[Edge], sizes: Sequence[int]) -> Node:
    attempts = ((division, rule(source, target, edges)) for division, rule in (_RULES if len(edges) > 1 else ()))
    division, parts = next(((division, parts) for division, parts in attempts if len(parts) > 1), (Division.LEAF, []))
    interior = sorted({vertex for edge in edges for vertex in edge} - {source, target})
    children = tuple(_divide(*part, sizes) for part in parts)
    cost = sum(sizes[vertex] for vertex in interior)
    return Node(source, target, tuple(interior), tuple(edges), division, children, cost)


Part = tuple[int, int, list[Edge]]


def linear_parts(source: int, target: int, edges: list[Edge]) -> list[Part]:
    """The segments between the vertices that no edge passes by."""
    parts: list[Part] = []
    start, farthest, inside = source, source, []
    for edge in edges:  # by their first vertices, which are in topological order
        if edge[0] == farthest and edge[0] != start:
            parts.append((start, farthest, inside))
            start, inside = farthest, []
        inside.append(edge)
        farthest = max(farthest, edge[1])
    return [*parts, (start, target, inside)]


def branch_parts(source: int, target: int, edges: list[Edge]) -> list[Part]:
    """A direct edge, and the connected parts of the interior, each with the source and the target."""
    leader: dict[int, int] = {vertex: vertex for edge in edges for vertex in edge}

    def find(vertex: int) -> int:
        while leader[vertex] != vertex:
            leader[vertex] = leader[leader[vertex]]
            vertex = leader[vertex]
        return vertex

    for a, b in edges:
        if a != source and b != target:
            first, second = sorted((find(a), find(b)))
            leader[second] = first
    groups: dict[int, list[Edge]] = {}
    for a, b in edges:
        groups.setdefault(find(a if a != source else b) if (a, b) != (source, target) else source, []).append((a, b))
    return [(source, target, groups[key]) for key in sorted(groups)]


def general_parts(source: int, target: int, edges: list[Edge]) -> list[Part]:
    """The largest independent segments that share no edge, and each edge that they leave over."""
    segments = independent_segments(source, target, edges)
    parts: list[Part] = []
    used = 0
    for a, b, mask in sorted(segments, key=lambda segment: (-segment[2].bit_count(), segment[:2])):
        if not used & mask:
            used |= mask
            parts.append((a, b, [edge for index, edge in enumerate(edges) if mask >> index & 1]))
    parts += [(*edge, [edge]) for index, edge in enumerate(edges) if not used >> index & 1]
    return sorted(parts)


_RULES = (
    (Division.LINEAR, linear_parts),
    (Division.BRANCHES, branch_parts),
    (Division.GENERAL, general_parts),
)


def independent_segments(source: int, target: int, edges: list[Edge]) -> list[tuple[int, int, int]]:
    """For each pair of eligible vertices its largest independent segment, as (a, b, edges as a bit set), if any.

    An interior vertex of [a, b] has all its ancestors but those before a behind a, so that every path to it passes a,
    and likewise b. What is left of those when the ones with a neighbour elsewhere are dropped, and their neighbours,
    and so on, is the segment.
    """
    graph = _BitGraph(source, target, edges)
    found: list[tuple[int, int, int]] = []
    for a in graph.eligible:
        for b in graph.eligible:
            if b <= a or (a, b) == (source, target):
                continue
            mask = graph.direct.get((a, b), 0)
            inside = graph.behind[a] & graph.before[b]
            if inside:
                for vertex in graph.members(graph.untouched(inside, a, b)):
                    mask |= graph.incident[vertex]
            if mask:
                found.append((a, b, mask))
    return found


class _BitGraph:
    """Bit sets over the vertices, renumbered from 0 in order, and over the edges of one segment."""

    def __init__(self, source: int, target: int, edges: list[Edge]):
        self.vertices = sorted({vertex for edge in edges for vertex in edge})
        self.bit = {vertex: 1 << index for index, vertex in enumerate(self.vertices)}
        self.neighbours = dict.fromkeys(self.vertices, 0)
        self.incident = dict.fromkeys(self.vertices, 0)
        self.direct = {edge: 1 << index for index, edge in enumerate(edges)}
        degree = dict.fromkeys(self.vertices, 0)
        before: dict[int, list[int]] = {vertex: [] for vertex in self.vertices}
        after: dict[int, list[int]] = {vertex: [] for vertex in self.vertices}
        for a, b in edges:
            before[b].append(a)
            after[a].append(b)
            for one, other in ((a, b), (b, a)):
                degree[one] += 1
                self.neighbours[one] |= self.bit[other]
                self.incident[one] |= self.direct[a, b]
        self.eligible = [vertex for vertex in self.vertices if degree[vertex] > 2 or vertex in (source, target)]
        self.behind = self._passed_by_all(self.vertices, before)
        self.before = self._passed_by_all(self.vertices[::-1], after)

    def _passed_by_all(self, order: Sequence[int], towards: dict[int, list[int]]) -> dict[int, int]:
        """For each vertex the others that no path reaches without it (those that it dominates)."""
        dominators: dict[int, int] = {}
        dominated = dict.fromkeys(order, 0)
        for vertex in order:
            common = -1 if towards[vertex] else 0
            for one in towards[vertex]:
                common &= dominators[one] | self.bit[one]
            dominators[vertex] = common
            for one in self.members(common):
                dominated[one] |= self.bit[vertex]
        return dominated

    def members(self, bits: int) -> Iterator[int]:
        """The vertices of a bit set."""
        while bits:
            low = bits & -bits
            yield self.vertices[low.bit_length() - 1]
            bits ^= low

    def untouched(self, inside: int, a: int, b: int) -> int:
        """What is left of `inside` without the connected parts that have a neighbour outside it, a and b."""
        allowed = inside | self.bit[a] | self.bit[b]
        dropped = sum(self.bit[v] for v in self.members(inside) if self.neighbours[v] & ~allowed)
        fresh = dropped
        while fresh:
            around = 0
            for vertex in self.members(fresh):
                around |= self.neighbours[vertex]
            fresh = around & inside & ~dropped
            dropped |= fresh
        return inside & ~dropped
