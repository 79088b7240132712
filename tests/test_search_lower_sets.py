"""Kusumoto et al.'s lower sets: the dynamic programme against all chains of lower sets, and its families of sets."""

import dataclasses
import itertools
import random

from random_graphs import training_graph

from remat_opt.search import Problem
from remat_opt.search.forward import forward_part
from remat_opt.search.lower_sets import (
    Blocks,
    Task,
    all_lower_sets,
    some_lower_sets,
    task_of,
)

GRAPHS = 300
MOST_CHAINS = 3000


def random_task(source: random.Random) -> Task:
    count = source.randint(1, 10)
    share = source.choice([0.2, 0.4, 0.7])
    predecessors = [[one for one in range(vertex) if source.random() < share] for vertex in range(count)]
    # The backward reads about in reverse order; cotangents are a matter of that time.
    last_read = [2 * (count - vertex) + source.randint(0, 3) for vertex in range(count)]
    cotangents = [source.randint(0, 9) for _ in range(2 * count + 4)]
    kept = [source.randint(0, 9) for _ in range(count)]
    return Task(
        predecessors,
        kept,
        [size if source.random() < 0.8 else 0 for size in kept],
        [float(source.randint(0, 5)) for _ in range(count)],
        last_read,
        [cotangents[time] for time in last_read],
    )


def chains_of(task: Task, sets: list[int]) -> list[tuple[int, ...]] | None:
    """All chains of lower sets from the empty one (left out) to the whole; None if there are too many."""
    ways = {sets[-1]: 1}
    for lower in sets[-2::-1]:
        ways[lower] = sum(count for other, count in ways.items() if other & lower == lower)
    if ways[0] > MOST_CHAINS:
        return None
    found: list[tuple[int, ...]] = []

    def extend(chain: tuple[int, ...]) -> None:
        if chain and chain[-1] == sets[-1]:
            found.append(chain)
            return
        below = chain[-1] if chain else 0
        for other in sets:
            if other != below and other & below == below:
                extend((*chain, other))

    extend(())
    return found


def vertices_of(lower: int, task: Task) -> set[int]:
    return {vertex for vertex in range(len(task)) if lower >> vertex & 1}


def boundary_of(lower: set[int], task: Task) -> set[int]:
    return {one for vertex in set(range(len(task))) - lower for one in task.predecessors[vertex] if one in lower}


def cost(task: Task, chain: tuple[int, ...]) -> tuple[int, float]:
    """Peak and extra time of a strategy, from the definition."""
    kept: set[int] = set()
    below: set[int] = set()
    peak, seconds = 0, 0.0
    for index, lower in enumerate(chain):
        inside = vertices_of(lower, task)
        block = inside - below
        for vertex in block:
            left = sum(task.residual[w] for w in block if task.last_read[w] >= task.last_read[vertex])
            peak = max(peak, sum(task.kept[v] for v in kept) + left + task.cotangents[vertex])
        boundary = boundary_of(inside, task)
        if index < len(chain) - 1:
            seconds += sum(task.seconds[vertex] for vertex in block - boundary)
        kept |= boundary
        below = inside
    return peak, seconds


def test_minimum_peak_and_minimum_time_are_those_of_all_chains_of_lower_sets() -> None:
    tested = 0
    for seed in itertools.count():
        if tested == GRAPHS:
            break
        task = random_task(random.Random(seed))
        sets = all_lower_sets(task.predecessors, 2000)
        if sets is None or (every := chains_of(task, sets)) is None:
            continue
        tested += 1
        costs = [cost(task, chain) for chain in every]
        blocks = Blocks(task, sets)
        least = min(peak for peak, _ in costs)
        assert blocks.minimum_peak() == least, seed
        assert blocks.minimum_seconds(least - 1) is None
        assert blocks.peak_of_saving_all() == cost(task, (sets[-1],))[0]
        for limit in sorted({peak for peak, _ in costs})[:4]:
            strategy = blocks.minimum_seconds(limit)
            assert strategy is not None
            peak, seconds = cost(task, tuple(sets[index] for index in strategy))
            assert peak <= limit
            assert seconds == min(seconds for peak, seconds in costs if peak <= limit), seed


def test_seconds_that_have_no_common_divisor_are_rounded() -> None:
    source = random.Random(0)
    for seed in range(40):
        task = random_task(random.Random(seed))
        task = dataclasses.replace(task, seconds=[source.random() + 0.1 for _ in range(len(task))])
        sets = all_lower_sets(task.predecessors, 2000)
        if sets is None or (every := chains_of(task, sets)) is None:
            continue
        blocks = Blocks(task, sets)
        limit = blocks.minimum_peak() + 5
        strategy = blocks.minimum_seconds(limit)
        assert strategy is not None
        peak, seconds = cost(task, tuple(sets[index] for index in strategy))
        assert peak <= limit
        fitting = [s for p, s in (cost(task, chain) for chain in every) if p <= limit]
        assert seconds <= min(fitting) + 0.05 * sum(task.seconds)


def test_lower_sets_of_two_branches() -> None:
    assert all_lower_sets([[], [0], [0], [1, 2]], 100) == [0, 0b1, 0b11, 0b101, 0b111, 0b1111]
    assert all_lower_sets([[]] * 20, 1000) is None


def test_every_lower_set_is_one_and_none_is_missing() -> None:
    for seed in range(50):
        task = random_task(random.Random(seed))
        expected = [
            lower
            for lower in range(1 << len(task))
            if all(lower >> one & 1 for vertex in vertices_of(lower, task) for one in task.predecessors[vertex])
        ]
        assert sorted(all_lower_sets(task.predecessors, 2000) or expected) == expected


def test_the_family_of_a_large_graph_is_of_lower_sets_and_holds_the_ends() -> None:
    for seed in range(10):
        forward = forward_part(Problem(training_graph(random.Random(seed), 30)))
        if not len(forward):
            continue
        family = some_lower_sets(forward, 12)
        task = task_of(forward)
        assert family[0] == 0
        assert family[-1] == (1 << len(forward)) - 1
        assert len(set(family)) == len(family) <= 14
        for lower in family:
            inside = vertices_of(lower, task)
            assert all(one in inside for vertex in inside for one in task.predecessors[vertex])


def test_a_chain_typed_by_hand() -> None:
    # Four vertices of 4 bytes and a cotangent of 1: all at once 17 bytes. Two blocks: 4 kept, 8 + 1 beside them.
    task = Task([[], [0], [1], [2]], [4] * 4, [4] * 4, [1.0] * 4, [4, 3, 2, 1], [1] * 4)
    sets = all_lower_sets(task.predecessors, 100)
    assert sets is not None
    blocks = Blocks(task, sets)
    assert blocks.peak_of_saving_all() == 17
    assert blocks.minimum_peak() == 13
    assert blocks.minimum_seconds(13) == (2, 4)  # vertex 0 runs again, vertex 1 is kept
    assert blocks.minimum_seconds(17) == (4,)
