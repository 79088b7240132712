"""The chain algorithms on chains typed as lists of sizes: against brute force over what each of them admits.

`test_search_chain_solvers.py` has the same algorithms as solvers of graphs.
"""

import dataclasses
import enum
import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from remat_opt.search import chen, rotor
from remat_opt.search.nested import NestedPlan

CHAINS = range(300)


def random_sizes(source: random.Random, least: int = 1) -> list[int]:
    return [source.randint(0, 20) for _ in range(source.randint(least, 10))]


# Herrmann, Beaumont et al. 2019


@dataclasses.dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of a chain; times in seconds, sizes in bytes.

    Attributes:
        forward_seconds: of one forward run.
        backward_seconds: of the backward run.
        input_bytes: w, of what the stage reads: the result of the stage before.
        kept_bytes: w̄, of all that its backward needs, its own result included and its input not.
        forward_transient: what a forward run needs besides its input, its result or what is kept of it.
        backward_transient: what the backward run needs besides its input, `kept_bytes` and `gradient_bytes`.
        gradient_bytes: of the gradient of the stage's result; 0 for the last stage.
    """

    forward_seconds: float
    backward_seconds: float
    input_bytes: int
    kept_bytes: int
    forward_transient: int = 0
    backward_transient: int = 0
    gradient_bytes: int = 0


class Action(enum.Enum):
    FORWARD = "forward"  # its input is evicted unless it is saved already
    SAVE_INPUT = "forward, its input saved"
    KEEP = "forward, everything kept"
    BACKWARD = "backward"


Step = tuple[Action, int]
"""What is done with a stage."""


def model_of(stages: Sequence[ChainStage]) -> rotor.Model:
    """A chain as the programme sees it."""
    count = len(stages)
    saved, swept = np.zeros((2, count, count), dtype=np.int64)
    for a, j in itertools.combinations(range(count), 2):
        saved[a, j] = stages[j].input_bytes
        moving = stages[j - 1].input_bytes if j - 1 > a else 0
        live = moving + stages[j - 1].forward_transient + stages[j].input_bytes
        swept[a, j] = max(swept[a, j - 1] if j - 1 > a else 0, live)
    return rotor.Model(
        forward=np.array([stage.forward_seconds for stage in stages], dtype=float),
        backward=np.array([stage.backward_seconds for stage in stages], dtype=float),
        saved=saved,
        swept=swept,
        kept=np.array([stage.kept_bytes for stage in stages]),
        keeping=np.array([stage.kept_bytes + stage.forward_transient for stage in stages]),
        reversing=np.array([s.kept_bytes + s.backward_transient + s.gradient_bytes for s in stages]),
        gradient=np.array([stage.gradient_bytes for stage in stages]),
    )


def optimal_sequence(stages: Sequence[ChainStage], memory: int) -> tuple[float, list[Step]] | None:
    """The least seconds and the steps that take them; None where the memory does not suffice."""
    programme = rotor.Programme(model_of(stages), memory)
    seconds = float(programme.seconds[0, -1, memory])
    return (seconds, list(steps_of(programme.plan(memory), len(stages)))) if seconds < math.inf else None


def steps_of(plan: NestedPlan, count: int) -> Iterator[Step]:
    """The steps of a nested plan, one by one."""
    kept: set[int] = set()
    held, turn = plan.first, count - 1
    while True:
        for stage, following in itertools.pairwise((*held.inputs, turn + 1)):
            if stage in held.stages:
                yield Action.KEEP, stage
            else:
                yield Action.SAVE_INPUT, stage
                yield from ((Action.FORWARD, between) for between in range(stage + 1, following))
        kept |= {*held.stages}
        while turn in kept:
            yield Action.BACKWARD, turn
            turn -= 1
        if turn < 0:
            return
        held = plan.before[turn]


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
            yield (Action.FORWARD, k), (turn, saved, kept, k + 1), stage.forward_seconds, live
        if moving >= 0:
            yield (Action.SAVE_INPUT, k), (turn, saved | {k}, kept, -1), 0.0, base + carried
        elif k not in kept:
            live = base + stage.kept_bytes + stage.forward_transient
            yield (Action.KEEP, k), (turn, saved, kept | {k}, -1), stage.forward_seconds, live
        elif k == turn:
            after = (turn - 1, saved - {turn}, kept - {turn}, -1)
            yield (Action.BACKWARD, k), after, stage.backward_seconds, base + stage.backward_transient


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
        action, stage = step
        if state[3] >= 0 and action in (Action.SAVE_INPUT, Action.KEEP):
            wanted.insert(0, (Action.SAVE_INPUT, state[3]))  # a kept stage's input stays, too
        if action is Action.SAVE_INPUT:  # the input is saved, and the stage runs
            wanted[-1] = Action.FORWARD, stage
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
        found = optimal_sequence(stages, memory)
        assert (found and found[0]) == minimum_seconds(stages, memory)
        if found:
            seconds, live = replay(stages, found[1])
            assert seconds == found[0]
            assert live <= memory


def test_a_nested_sequence_by_hand() -> None:
    # Unit stages whose backward needs their one intermediate value beside their input.
    stages = [ChainStage(1.0, 1.0, 1, 1)] * 4
    assert optimal_sequence(stages, 0) is None
    found = optimal_sequence(stages, 4)
    assert found is not None
    assert found[0] == 8.0
    found = optimal_sequence(stages, 2)
    assert found is not None
    seconds, steps = found
    saved, on, keep, back = Action.SAVE_INPUT, Action.FORWARD, Action.KEEP, Action.BACKWARD
    # One value is saved at a time, and every stage but the last runs again for each one behind it.
    assert steps == [
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
        assert chen.close_segments(sizes, limit) == closed_by_definition(sizes, limit)


def test_the_grid_lies_evenly_round_the_root_of_what_a_run_without_limit_takes() -> None:
    grid = chen.limits(checkpoints=32, largest=8, count=5)  # B0 = 16
    assert grid == pytest.approx([16 / math.sqrt(2), 16 / 2**0.25, 16, 16 * 2**0.25, 16 * math.sqrt(2)])
    assert chen.limits(0, 8) == [0.0] * chen.GRID


@pytest.mark.parametrize(
    ("layers", "ends"), [(0, ()), (1, ()), (2, (1,)), (4, (2,)), (9, (3, 6)), (16, (4, 8, 12)), (10, (3, 6, 9))]
)
def test_a_checkpoint_every_root_of_n_layers(layers: int, ends: tuple[int, ...]) -> None:
    assert chen.square_root_split(layers) == ends
