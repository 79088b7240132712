"""Feng & Huang's checkpoints: optimal on chains; the division tree by its definition, its distance to the optimum."""

import itertools
import random
from collections.abc import Iterable

import pytest
from random_graphs import Sketch

from remat_opt.search import Problem
from remat_opt.search.division_tree import Division, Edge, Node, branch_parts, divide, independent_segments
from remat_opt.search.feng_huang import _Search, checkpoints_of_chain, checkpoints_of_graph, max_terms, solve, tied
from remat_opt.search.forward import forward_backward_boundary, forward_part

GRAPHS = 300


def random_edges(source: random.Random, count: int) -> list[Edge]:
    """A graph of `count` vertices, each on a path from vertex 0 to the last."""
    share = source.choice([0.1, 0.2, 0.4])
    edges = {(a, b) for a, b in itertools.combinations(range(count), 2) if source.random() < share}
    for vertex in range(1, count):
        if not any(b == vertex for _, b in edges):
            edges.add((source.randint(max(0, vertex - 3), vertex - 1), vertex))
    for vertex in range(count - 1):
        if not any(a == vertex for a, _ in edges):
            edges.add((vertex, source.randint(vertex + 1, min(count - 1, vertex + 3))))
    return sorted(edges)


def random_graph(seed: int) -> tuple[list[Edge], list[int]]:
    source = random.Random(seed)
    count = source.randint(2, 10)
    return random_edges(source, count), [source.randint(0, 9) for _ in range(count)]


def chain_edges(count: int) -> list[Edge]:
    return [(index, index + 1) for index in range(count - 1)]


def connected_parts(edges: Iterable[Edge], vertices: Iterable[int]) -> list[set[int]]:
    parts = [{vertex} for vertex in vertices]
    for a, b in edges:
        touched = [part for part in parts if a in part or b in part]
        if len({*itertools.chain(*touched)} & {a, b}) == 2 and len(touched) == 2:
            parts = [part for part in parts if part not in touched] + [touched[0] | touched[1]]
    return parts


def objective(edges: list[Edge], sizes: list[int], checkpoints: set[int]) -> int:
    """Bytes of the checkpoints, and the most bytes of a part that they leave connected."""
    rest = set(range(1, len(sizes) - 1)) - checkpoints
    inside = [edge for edge in edges if rest.issuperset(edge)]
    parts = [sum(sizes[vertex] for vertex in part) for part in connected_parts(inside, rest)]
    return sum(sizes[vertex] for vertex in checkpoints) + max(parts, default=0)


def optimum(edges: list[Edge], sizes: list[int]) -> int:
    interior = range(1, len(sizes) - 1)
    subsets = itertools.chain.from_iterable(itertools.combinations(interior, k) for k in range(len(interior) + 1))
    return min(objective(edges, sizes, set(subset)) for subset in subsets)


# Chains


def test_on_random_chains_the_checkpoints_are_optimal() -> None:
    for seed in range(GRAPHS):
        source = random.Random(seed)
        sizes = [source.randint(0, 9) for _ in range(source.randint(2, 10))]
        edges = chain_edges(len(sizes))
        found = checkpoints_of_chain(sizes)
        assert found.objective == optimum(edges, sizes), seed
        assert objective(edges, sizes, set(found.vertices)) <= found.objective


def test_checkpoints_of_a_chain_typed_by_hand() -> None:
    # Between the ends: 5 5 1 5 5. Keeping the 1 leaves two parts of 10 bytes.
    found = checkpoints_of_chain([9, 5, 5, 1, 5, 5, 9])
    assert found.vertices == (3,)
    assert (found.bytes, found.max_term) == (1, 10)


def test_a_long_chain_of_equal_values_has_checkpoints_at_the_square_root() -> None:
    found = checkpoints_of_chain([1] * 102)
    assert found.objective == 19  # 9 checkpoints leave 91 in parts of 10, 12 leave 88 in parts of 7
    assert 9 <= len(found.vertices) <= 12


def test_max_terms_are_the_sums_between_any_two_vertices() -> None:
    sizes = [0, 1, 10, 100, 0]
    assert max_terms(divide(chain_edges(5), sizes), sizes) == [0, 1, 10, 11, 100, 110, 111]


@pytest.mark.parametrize("count", [30, 80])
def test_leaving_max_terms_out_loses_nothing(count: int) -> None:
    for seed in range(10):
        source = random.Random(seed)
        sizes = [source.randint(0, 99) for _ in range(count)]
        edges = random_edges(source, count) if seed % 2 else chain_edges(count)
        search = _Search(divide(edges, sizes), sizes)
        best = search.best(1)[0]
        evaluated = len(search.known)
        every = [search.least(term) for term in search.terms]
        assert best.objective == min(found.objective for found in every)
        kept = [found.bytes for found in every]
        assert kept == sorted(kept, reverse=True)  # what the bounds rest on
        assert evaluated < len(every) or len(every) < 60


# The division tree against its definition


def closure(edges: Iterable[Edge], vertex: int) -> set[int]:
    """The vertices that can be reached along edges."""
    found, stack = set(), [vertex]
    while stack:
        current = stack.pop()
        for a, b in edges:
            if a == current and b not in found:
                found.add(b)
                stack.append(b)
    return found


def ancestors(edges: Iterable[Edge], vertex: int) -> set[int]:
    return closure([(b, a) for a, b in edges], vertex)


def segment_by_definition(edges: list[Edge], a: int, b: int) -> frozenset[Edge]:
    """The largest independent segment [a, b], as algorithms.md has it."""
    after, before = closure(edges, a), ancestors(edges, b)
    interior = after & before
    neighbours: dict[int, set[int]] = {}
    for one, other in edges:
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    dropped = {vertex for vertex in interior if neighbours[vertex] - interior - {a, b}}
    while True:
        more = {
            vertex
            for vertex in interior - dropped
            if (neighbours[vertex] | closure(edges, vertex) | ancestors(edges, vertex)) & dropped
        }
        if not more:
            break
        dropped |= more
    left = interior - dropped | {a, b}
    return frozenset(edge for edge in edges if left.issuperset(edge))


def splits(edges: list[Edge], vertex: int) -> bool:
    before = {*ancestors(edges, vertex), vertex}
    after = {*closure(edges, vertex), vertex}
    return all(before.issuperset(edge) or after.issuperset(edge) for edge in edges)


def check_division(node: Node) -> None:
    """The definition of one node, by the slowest ways."""
    edges = list(node.edges)
    shared = sorted(edge for child in node.children for edge in child.edges)
    splitting = [vertex for vertex in node.interior if splits(edges, vertex)]
    if node.division is Division.LEAF:
        assert edges == [(node.source, node.target)]
        return
    assert shared == edges
    for child in node.children:  # independent: the interior touches nothing outside
        assert all(edge in child.edges for edge in edges if set(child.interior).intersection(edge))
    if node.division is Division.LINEAR:
        assert list(node.joints) == splitting
        ends = [node.source, *splitting, node.target]
        assert [(child.source, child.target) for child in node.children] == list(itertools.pairwise(ends))
        return
    assert not splitting
    inside = [edge for edge in edges if {node.source, node.target}.isdisjoint(edge)]
    parts = connected_parts(inside, node.interior)
    direct = (node.source, node.target) in edges
    if node.division is Division.BRANCHES:
        assert sorted(child.interior for child in node.children if child.interior) == sorted(
            tuple(sorted(part)) for part in parts
        )
        assert len(node.children) == len(parts) + direct
        return
    assert len(parts) + direct == 1
    for child in node.children:
        assert len(child.edges) == 1 or frozenset(child.edges) == segment_by_definition(
            edges, child.source, child.target
        )


def test_the_division_tree_keeps_its_definition() -> None:
    seen = dict.fromkeys(Division, 0)
    for seed in range(GRAPHS):
        edges, sizes = random_graph(seed)
        tree = divide(edges, sizes)
        assert list(tree.edges) == edges
        for node in tree.walk():
            check_division(node)
            assert node.cost == sum(sizes[vertex] for vertex in node.interior)
            seen[node.division] += 1
    assert min(seen.values()) > 50, seen


def test_independent_segments_are_the_largest_of_their_pairs() -> None:
    compared = 0
    for seed in range(GRAPHS):
        edges, sizes = random_graph(seed)
        last = len(sizes) - 1
        degree = [sum(vertex in edge for edge in edges) for vertex in range(len(sizes))]
        eligible = [vertex for vertex in range(len(sizes)) if degree[vertex] > 2 or vertex in (0, last)]
        found = {(a, b): mask for a, b, mask in independent_segments(0, last, edges)}
        for a, b in itertools.combinations(eligible, 2):
            if (a, b) == (0, last):
                continue
            mask = found.get((a, b), 0)
            inside = frozenset(edge for index, edge in enumerate(edges) if mask >> index & 1)
            assert inside == segment_by_definition(edges, a, b), (seed, a, b)
            compared += bool(inside)
    assert compared > 500


def test_general_segments_that_share_no_edge_are_taken_the_largest_first() -> None:
    checked = 0
    for seed in range(GRAPHS):
        for node in divide(*random_graph(seed)).walk():
            if node.division is Division.GENERAL:
                largest = max(mask.bit_count() for _, _, mask in _segments(node))
                assert max(len(child.edges) for child in node.children) == largest
                checked += 1
    assert checked > 50


def _segments(node: Node) -> list[tuple[int, int, int]]:
    return independent_segments(node.source, node.target, list(node.edges))


def test_a_residual_block_is_two_branches() -> None:
    # 0 → 1 → 2 → 3 → 4 → 5 with a skip 1 → 4.
    tree = divide([(0, 1), (1, 2), (2, 3), (3, 4), (1, 4), (4, 5)], [0, 1, 2, 4, 8, 0])
    assert tree.division is Division.LINEAR
    assert tree.joints == (1, 4)
    block = tree.children[1]
    assert (block.division, block.cost) == (Division.BRANCHES, 6)
    assert sorted(child.interior for child in block.children) == [(), (2, 3)]
    assert len(branch_parts(1, 4, list(block.edges))) == 2


def test_crossing_branches_are_divided_into_chains() -> None:
    # Two paths 0 1 2 7 and 0 3 4 5 6 7 with an edge 1 → 5: neither linear nor branches.
    edges = [(0, 1), (1, 2), (2, 7), (0, 3), (3, 4), (4, 5), (1, 5), (5, 6), (6, 7)]
    tree = divide(sorted(edges), [0, 1, 1, 1, 1, 1, 1, 0])
    assert tree.division is Division.GENERAL
    assert tree.joints == (1, 5)
    ends = sorted((child.source, child.target, child.interior) for child in tree.children)
    assert ends == [(0, 1, ()), (0, 5, (3, 4)), (1, 5, ()), (1, 7, (2,)), (5, 7, (6,))]


def test_what_the_division_tree_finds_is_possible_and_what_it_says() -> None:
    for seed in range(GRAPHS):
        edges, sizes = random_graph(seed)
        found = checkpoints_of_graph(edges, sizes)
        assert objective(edges, sizes, set(found.vertices)) <= found.objective
        assert optimum(edges, sizes) <= found.objective <= sum(sizes[1:-1])


# The forward part of a step


def masked_step() -> tuple[Problem, list[int]]:
    """Two layers with dropout from random bits, a mask that only the backward reads, and a result of the forward."""
    sketch = Sketch()
    data, key = sketch.input(8), sketch.input(1)
    first = sketch.op(data, size=80)
    bits = sketch.op(key, size=40)
    dropped = sketch.op(first, bits, size=80)
    sign = sketch.op(first, size=30)
    metric = sketch.op(dropped, size=80)
    second = sketch.op(dropped, size=80)
    loss = sketch.op(second, size=20)
    back = sketch.op(loss, second, dropped, size=80)
    last = sketch.op(back, sign, bits, first, size=8)
    graph = sketch.graph(last, metric)
    return Problem(graph), [first, bits, dropped, sign, second, loss]


def test_the_forward_part_ends_where_the_cotangents_come_back() -> None:
    problem, values = masked_step()
    assert forward_backward_boundary(problem) == 7  # the loss and the ops before it go forward
    forward = forward_part(problem)
    assert [made for (made,) in forward.values] == values  # no metric: it is returned, and there in any case
    assert forward.predecessors == ((), (), (0, 1), (0,), (2,), (4,))


def test_loose_ends_are_tied_to_their_neighbourhood() -> None:
    problem, _ = masked_step()
    # The random bits come behind the first layer, and the sign that only the backward reads before the second.
    assert set(tied(forward_part(problem))) == {(0, 2), (1, 2), (0, 3), (2, 4), (4, 5), (0, 1), (3, 4)}


def test_checkpoints_of_a_residual_network_are_block_ends() -> None:
    sketch = Sketch()
    data = sketch.input(9)
    blocks = [data]
    inner: list[tuple[int, int, int]] = []
    for _ in range(9):
        a = sketch.op(blocks[-1], size=9)
        b = sketch.op(a, size=9)
        blocks.append(sketch.op(b, blocks[-1], size=9))
        inner.append((a, b, blocks[-1]))
    cotangent = sketch.op(blocks[-1], size=9)
    for (a, b, end), start in zip(reversed(inner), reversed(blocks[:-1]), strict=True):
        cotangent = sketch.op(cotangent, a, b, end, start, size=9)
    problem = Problem(sketch.graph(cotangent))
    solution = solve(problem, None)
    made = solution.choice.saved & {value for block in inner for value in block}
    assert made <= set(blocks[:-1])
    assert solution.peak < problem.plain.peak * 0.6
