"""The chain algorithms on chains typed as lists of sizes: against brute force over what each of them admits.

`test_search_chain_solvers.py` has the same algorithms as solvers of graphs.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from remat_opt.search import chen, rotor
from remat_opt.search.rotor import Action, ChainStage, Step

CHAINS = range(300)


def random_sizes(source: random.Random, least: int = 1) -> list[int]:
    return [source.randint(0, 20) for _ in range(source.randint(least, 10))]


# Herrmann, Beaumont et al. 2019


def random_stages(source: random.Random, most: int = 5) -> list[ChainStage]:
    count = source.randint(1, most)
    inputs = [source.randint(0, 4) for _ in range(count)]
    return [
        ChainStage(
            forward_seconds=source.randint(1, 5),
            backward_seconds=source.randint(1, 5),
            input_bytes=inputs[k],
            kept_bytes=(inputs[k + 1] if k + 1 < count else 0) + source.randint(0, 4),
            forward_transient=source.choice([0, 0, 1, 2]),
            backward_transient=source.choice([0, 1, 2]),
            gradient_bytes=source.randint(0, 3) if k + 1 < count else 0,
        )
        for k in range(count)
    ]


State = tuple[int, frozenset[int], frozenset[int], int]
"""The stage whose backward is next, stages whose input is saved, kept stages, and the stage whose input is on its way
through the chain (−1: none)."""
Move = tuple[Step, State, float, int]


def moves(stages: Sequence[ChainStage], state: State) -> Iterator[Move]:
    """What can be done: the step, the state behind it, its seconds, and the memory that it takes.

    What was saved or kept goes only with its backward. What is on its way must go on, or be saved where it is: then the
    sweep stops there, or goes on from the saved one.
    """
    turn, saved, kept, moving = state
    base = sum(stages[k].input_bytes for k in saved) + sum(stages[k].kept_bytes for k in kept)
    base += stages[turn].gradient_bytes if turn >= 0 else 0
    sources = [moving] if moving >= 0 else [k for k in range(turn + 1) if k == 0 or k in saved or k - 1 in kept]
    for k in sources:
        stage = stages[k]
        carried = stage.input_bytes if moving >= 0 else 0
        if k < turn and k + 1 < len(stages):
            live = base + carried + stage.forward_transient + stages[k + 1].input_bytes
            yield Step(Action.FORWARD, k), (turn, saved, kept, k + 1), stage.forward_seconds, live
        if moving >= 0:
            yield Step(Action.SAVE_INPUT, k), (turn, saved | {k}, kept, -1), 0.0, base + carried
        elif k not in kept:
            live = base + stage.kept_bytes + stage.forward_transient
            yield Step(Action.KEEP, k), (turn, saved, kept | {k}, -1), stage.forward_seconds, live
        elif k == turn:
            after = (turn - 1, saved - {turn}, kept - {turn}, -1)
            yield Step(Action.BACKWARD, k), after, stage.backward_seconds, base + stage.backward_transient


def minimum_seconds(stages: Sequence[ChainStage], memory: int) -> float | None:
    """By brute force: the shortest way to the end through all states of a persistent schedule."""
    start: State = (len(stages) - 1, frozenset(), frozenset(), -1)
    best: dict[State, float] = {start: 0.0}
    order = itertools.count()
    queue = [(0.0, next(order), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state[0] < 0:
            return seconds
        if seconds > best[state]:
            continue
        for _, behind, time, live in moves(stages, state):
            if live <= memory and seconds + time < best.get(behind, math.inf):
                best[behind] = seconds + time
                heapq.heappush(queue, (seconds + time, next(order), behind))
    return None


def replay(stages: Sequence[ChainStage], steps: Sequence[Step]) -> tuple[float, int]:
    """Seconds and memory of a sequence; fails where a step lacks what it needs."""
    state: State = (len(stages) - 1, frozenset(), frozenset(), -1)
    total, most = 0.0, 0
    for step in steps:
        wanted = [step]
        if state[3] >= 0 and step.action in (Action.SAVE_INPUT, Action.KEEP):
            wanted.insert(0, Step(Action.SAVE_INPUT, state[3]))  # a kept stage's input stays, too
        if step.action is Action.SAVE_INPUT:  # the input is saved, and the stage runs
            wanted[-1] = Step(Action.FORWARD, step.stage)
        for one in wanted:
            found = {move[0]: move for move in moves(stages, state)}
            assert one in found, f"{one} cannot be done in {state}"
            _, state, seconds, live = found[one]
            total, most = total + seconds, max(most, live)
    assert state[0] == -1
    return total, most


@pytest.mark.parametrize("seed", CHAINS)
def test_rotor_is_the_least_of_all_persistent_schedules(seed: int) -> None:
    source = random.Random(seed)
    stages = random_stages(source)
    everything = sum(stage.kept_bytes for stage in stages) + 6
    for memory in (source.randint(0, everything), source.randint(everything // 2, everything)):
        found = rotor.optimal_sequence(stages, memory)
        assert (found and found[0]) == minimum_seconds(stages, memory)
        if found:
            seconds, live = replay(stages, found[1])
            assert seconds == found[0]
            assert live <= memory


def test_a_nested_sequence_by_hand() -> None:
    # Unit stages whose backward needs their one intermediate value beside their input.
    stages = [ChainStage(1.0, 1.0, 1, 1)] * 4
    assert rotor.optimal_sequence(stages, 0) is None
    found = rotor.optimal_sequence(stages, 4)
    assert found is not None
    assert found[0] == 8.0
    found = rotor.optimal_sequence(stages, 2)
    assert found is not None
    seconds, steps = found
    saved, on, keep, back = Action.SAVE_INPUT, Action.FORWARD, Action.KEEP, Action.BACKWARD
    # One value is saved at a time, and every stage but the last runs again for each one behind it.
    assert [(step.action, step.stage) for step in steps] == [
        (saved, 0), (on, 1), (on, 2), (keep, 3), (back, 3),
        (saved, 0), (on, 1), (keep, 2), (back, 2),
        (keep, 0), (keep, 1), (back, 1), (back, 0),
    ]  # fmt: skip
    assert seconds == 4 + (3 + 2) + 4


# Chen et al. 2016


def closed_by_definition(sizes: Sequence[int], limit: float) -> tuple[int, ...]:
    """The ends of segments: each is the first at which the bytes since the one before pass the limit."""
    ends: list[int] = []
    while True:
        start = ends[-1] if ends else 0
        passing = [end for end in range(start + 1, len(sizes)) if sum(sizes[start:end]) > limit]
        if not passing:
            return tuple(ends)
        ends.append(passing[0])


@pytest.mark.parametrize("seed", CHAINS)
def test_a_walk_closes_a_segment_where_its_bytes_pass_the_limit(seed: int) -> None:
    source = random.Random(seed)
    sizes = random_sizes(source)
    for limit in (0, source.randint(0, 60), sum(sizes)):
        ends = chen.close_segments(sizes, limit)
        assert ends == closed_by_definition(sizes, limit)
        assert chen.largest_segment(sizes, ends) == max(
            sum(sizes[start:stop]) for start, stop in itertools.pairwise((0, *ends, len(sizes)))
        )


def test_the_grid_lies_evenly_round_the_root_of_what_a_run_without_limit_takes() -> None:
    grid = chen.limits(checkpoints=32, largest=8, count=5)  # B0 = 16
    assert grid == pytest.approx([16 / math.sqrt(2), 16 / 2**0.25, 16, 16 * 2**0.25, 16 * math.sqrt(2)])
    assert chen.limits(0, 8) == (0.0,) * chen.GRID


@pytest.mark.parametrize(
    ("layers", "ends"), [(0, ()), (1, ()), (2, (1,)), (4, (2,)), (9, (3, 6)), (16, (4, 8, 12)), (10, (3, 6, 9))]
)
def test_a_checkpoint_every_root_of_n_layers(layers: int, ends: tuple[int, ...]) -> None:
    assert chen.square_root_split(layers) == ends
