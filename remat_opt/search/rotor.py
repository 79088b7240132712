"""Nested recomputation of a chain: Herrmann, Beaumont, Eyraud-Dubois, Joly, Shilova 2019, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory" (arXiv:1911.13214), their dynamic programme
for persistent schedules.

Stages 0 … n − 1 run forward, then backward from the last to the first. A forward may keep nothing, its input, or all
that its backward needs; what is kept stays until the stage's backward (the schedule is *persistent*). With stage a's
input there, and not counted in the memory m, the least seconds for stages a … b, forward and backward, are the least of

    Σ forward(a … j − 1) + opt(m − w_j, j, b) + opt(m, a, j − 1)        for a < j ≤ b: save the input of j, and run
                                                                        a … j − 1 again, nested, when their turn comes
    forward(a) + backward(a) + opt(m − w̄_a, a + 1, b)                   keep everything of stage a

wherever what is live on the way fits: `optimal_sequence`, O(n³·m). It is exact for integer sizes; `solve` measures them
in slots.

*On graphs* stages are the intervals between cuts of the topological order. What the plain step holds says what they
take, and the input of stage j costs the bytes that cross its cut and did not cross cut a. The programme gives a plan
for every number of slots; because its model is not the simulation, several of them are turned into schedules, and the
simulated peaks decide.

Gaps: one turning point; at most `MOST_STAGES` cuts; everything or nothing of a stage is kept (Rockmate offers several
options for each); schedules that forget a saved input before its use are left out, as in the paper.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from remat_opt.search.problem import Problem, Solution
from remat_opt.search.stages import (
    Held,
    NestedPlan,
    Stages,
    best_of,
    in_slots,
    later_bytes,
    nested_solution,
    stages_before_peak,
    sweep,
)

MOST_STAGES = 60
SLOTS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of a chain; times in seconds, sizes in bytes or slots.

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
    """What is done with a stage."""

    FORWARD = "forward"  # its input is forgotten unless it is saved already
    SAVE_INPUT = "forward, its input saved"
    KEEP = "forward, everything kept"
    BACKWARD = "backward"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operation of a sequence."""

    action: Action
    stage: int


def optimal_sequence(stages: Sequence[ChainStage], memory: int) -> tuple[float, tuple[Step, ...]] | None:
    """The least seconds and the sequence that takes them; None where `memory` does not suffice.

    `memory` holds everything but the input of the first stage, in the unit of the stages' sizes.
    """
    programme = _Programme(_model(stages), memory)
    seconds = float(programme.seconds[0, -1, memory])
    return (seconds, programme.sequence(memory)) if seconds < np.inf else None


@dataclasses.dataclass(frozen=True)
class _Model:
    """A chain as the programme sees it; for stages a and j > a.

    Attributes:
        forward: [a], seconds of a forward run.
        backward: [a], seconds of the backward run.
        saved: [a, j], bytes of the input of j while that of a is saved.
        swept: [a, j], most bytes live while a … j − 1 run forward and keep nothing.
        kept: [a], bytes of all that is kept of a stage.
        keeping: [a], most bytes live while a stage runs forward and is kept.
        reversing: [a], most bytes live while a kept stage runs backward, gradients included.
        gradient: [a], bytes of the gradients that are there before the backward of a stage.
    """

    forward: np.ndarray
    backward: np.ndarray
    saved: np.ndarray
    swept: np.ndarray
    kept: np.ndarray
    keeping: np.ndarray
    reversing: np.ndarray
    gradient: np.ndarray

    def in_slots(self, slot: int) -> _Model:
        """Sizes in slots: what stays as `in_slots` rounds it, what has to fit rounded up."""

        def up(sizes: np.ndarray) -> np.ndarray:
            return -(-sizes // slot)

        return dataclasses.replace(
            self,
            saved=in_slots(self.saved, slot),
            kept=in_slots(self.kept, slot),
            swept=up(self.swept),
            keeping=up(self.keeping),
            reversing=up(self.reversing),
            gradient=up(self.gradient),
        )


def _model(stages: Sequence[ChainStage]) -> _Model:
    count = len(stages)
    saved, swept = np.zeros((2, count, count), dtype=np.int64)
    for a in range(count):
        for j in range(a + 1, count):
            saved[a, j] = stages[j].input_bytes
            moving = stages[j - 1].input_bytes if j - 1 > a else 0
            live = moving + stages[j - 1].forward_transient + stages[j].input_bytes
            swept[a, j] = max(swept[a, j - 1] if j - 1 > a else 0, live)
    return _Model(
        forward=np.array([stage.forward_seconds for stage in stages], dtype=float),
        backward=np.array([stage.backward_seconds for stage in stages], dtype=float),
        saved=saved,
        swept=swept,
        kept=np.array([stage.kept_bytes for stage in stages], dtype=np.int64),
        keeping=np.array([stage.kept_bytes + stage.forward_transient for stage in stages], dtype=np.int64),
        reversing=np.array([s.kept_bytes + s.backward_transient + s.gradient_bytes for s in stages], dtype=np.int64),
        gradient=np.array([stage.gradient_bytes for stage in stages], dtype=np.int64),
    )


class _Programme:
    """The table of the least seconds for stages a … b and every memory, with the decisions that lead there."""

    def __init__(self, model: _Model, memory: int):
        self.model, self.count = model, len(model.forward)
        self.rooms = np.arange(memory + 1)
        self.seconds = np.full((self.count, self.count, memory + 1), np.inf)
        self.decision = np.zeros((self.count, self.count, memory + 1), dtype=np.int16)  # 0: keep, k: save a + k's input
        for length in range(self.count):
            for a in range(self.count - length):
                self._decide(a, a + length)

    def _decide(self, a: int, b: int) -> None:
        model, rooms = self.model, self.rooms
        left = rooms - model.kept[a]
        fits = (rooms >= max(model.keeping[a] + model.gradient[b], model.reversing[a])) & (left >= 0)
        behind = self.seconds[a + 1, b, np.maximum(left, 0)] if b > a else 0.0
        options = [np.where(fits, model.forward[a] + model.backward[a] + behind, np.inf)[None, :]]
        if b > a:
            splits = np.arange(a + 1, b + 1)
            left = rooms[None, :] - model.saved[a, splits, None]
            fits = (rooms[None, :] >= model.swept[a, splits, None] + model.gradient[b]) & (left >= 0)
            behind = self.seconds[splits[:, None], b, np.maximum(left, 0)]
            time = np.cumsum(model.forward[a:b])[:, None] + behind + self.seconds[a, splits - 1]
            options.append(np.where(fits, time, np.inf))
        table = np.concatenate(options)
        self.decision[a, b] = table.argmin(axis=0)
        self.seconds[a, b] = table.min(axis=0)

    def memories(self) -> list[int]:
        """Each memory that gives a shorter sequence than the one below it."""
        best = self.seconds[0, -1]
        return [m for m in range(len(best)) if best[m] < (best[m - 1] if m else np.inf)]

    def sequence(self, memory: int) -> tuple[Step, ...]:
        """The operations, in order."""
        steps: list[Step] = []
        # What is still to be done, the next at the end: stages a … b within a memory, or one step.
        todo: list[tuple[int, int, int] | Step] = [(0, self.count - 1, memory)]
        while todo:
            task = todo.pop()
            if isinstance(task, Step):
                steps.append(task)
                continue
            a, b, room = task
            split = a + int(self.decision[a, b, room])
            if split > a:
                steps.append(Step(Action.SAVE_INPUT, a))
                steps += [Step(Action.FORWARD, stage) for stage in range(a + 1, split)]
                todo += [(a, split - 1, room), (split, b, room - int(self.model.saved[a, split]))]
                continue
            steps.append(Step(Action.KEEP, a))
            todo.append(Step(Action.BACKWARD, a))
            if b > a:
                todo.append((a + 1, b, room - int(self.model.kept[a])))
        return tuple(steps)


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    stages = stages_before_peak(problem, MOST_STAGES)
    if stages is None or (budget is not None and problem.plain.peak <= budget):
        return problem.plain
    models = _models_of_graph(stages)
    best = problem.plain if budget is None else _fitting(stages, models, budget)
    if budget is not None and best.peak <= budget:
        return best
    found = [(_simulated(stages, model, problem.plain.peak, None), model) for model in models]
    least, model = min(found, key=lambda pair: (pair[0].peak, pair[0].extra_seconds))
    finer = _simulated(stages, model, least.peak * 5 // 4, None)  # in smaller slots
    best = best_of(problem, [best, least, finer], budget)
    return best_of(problem, [best, _fitting(stages, models, best.peak)], budget)


def _fitting(stages: Stages, models: Sequence[_Model], budget: int) -> Solution:
    capacity = min(2 * budget, stages.problem.plain.peak)
    return best_of(stages.problem, [_simulated(stages, model, capacity, budget) for model in models[:2]], budget)


def _simulated(stages: Stages, model: _Model, capacity: int, budget: int | None) -> Solution:
    """The best of some solutions of the programme with at most `capacity` bytes, see `sweep`."""
    slot = max(1, -(-capacity // SLOTS))
    programme = _Programme(model.in_slots(slot), -(-capacity // slot))
    plans = [_plan(programme.sequence(memory)) for memory in programme.memories()]
    solutions = sweep(lambda index: nested_solution(stages, plans[index]), len(plans), budget)
    return best_of(stages.problem, solutions, budget)


def _plan(sequence: Sequence[Step]) -> NestedPlan:
    """The sequence's forward steps, gathered by the backward that follows them."""
    sweeps: list[tuple[int, Held]] = []
    inputs: list[int] = []
    kept: list[int] = []
    for step in sequence:
        if step.action in (Action.SAVE_INPUT, Action.KEEP):
            inputs.append(step.stage)  # the backward reads what a kept stage has read
        if step.action is Action.KEEP:
            kept.append(step.stage)
        elif step.action is Action.BACKWARD and (inputs or kept):
            sweeps.append((step.stage, Held(tuple(inputs), tuple(kept))))
            inputs, kept = [], []
    before = {stage: held for _, held in sweeps[1:] for stage in held.stages}
    return NestedPlan(sweeps[0][1], before)


def _models_of_graph(stages: Stages) -> tuple[_Model, _Model, _Model]:
    """What the stages take, and twice what they may take instead.

    The second adds what was made behind a stage and is still there when it runs backward in the plain step; where
    backward ops of several stages mix, that may be too much. The third halves what backward runs need beyond what is
    kept, because their most may come together with less of the rest than the plain step's order says.
    """
    costs, cuts, count = stages.costs, stages.cuts, len(stages)
    saved = np.zeros((count, count), dtype=np.int64)
    for a in range(count):
        saved[a, a + 1 :] = [costs.crossing_bytes(a, j) for j in range(a + 1, count)]
    ends = [*range(1, count), None]
    kept = [costs.kept_bytes(a, a + 1) for a in range(count - 1)] + [costs.residual_bytes(count - 1, None)]
    keeping = [costs.forward_peak(a, a + 1) for a in range(count - 1)] + kept[-1:]
    reversing = np.array([costs.backward_peak(a, end) for a, end in enumerate(ends)], dtype=np.int64)
    later, residuals = later_bytes(stages)
    model = _Model(
        forward=np.diff(cuts.seconds[[*cuts.positions, cuts.turn]]),
        backward=np.zeros(count),  # once in every plan
        saved=saved,
        swept=_swept(stages),
        kept=np.array(kept, dtype=np.int64),
        keeping=np.array(keeping, dtype=np.int64),
        reversing=reversing,
        gradient=later - residuals,
    )
    later_too = dataclasses.replace(model, reversing=reversing + residuals, gradient=later)
    least = np.minimum(reversing, model.kept)
    halved = dataclasses.replace(model, reversing=(least + reversing) // 2, gradient=model.gradient // 2)
    return model, later_too, halved


def _swept(stages: Stages) -> np.ndarray:
    """[a, j], most bytes live of what a … j − 1 make, where only what later forward ops read is held."""
    turn, positions = stages.cuts.turn, stages.cuts.positions
    lives = [
        (buffer.birth, max((read for read in buffer.reads if read < turn), default=buffer.birth), buffer.size)
        for buffer in stages.problem.plain.liveness.buffers
        if buffer.size and buffer.birth < turn
    ]
    swept = np.zeros((len(stages), len(stages)), dtype=np.int64)
    for a, start in enumerate(positions):
        change = np.zeros(turn + 1, dtype=np.int64)
        for birth, last, size in lives:
            if birth >= start:
                change[birth] += size
                change[last + 1] -= size
        most = np.maximum.accumulate(np.cumsum(change))
        swept[a, a + 1 :] = most[np.array(positions[a + 1 :], dtype=np.int64) - 1]
    return swept
