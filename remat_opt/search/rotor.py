"""Nested recomputation of a chain: Herrmann, Beaumont, Eyraud-Dubois, Joly, Shilova 2019, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory" (arXiv:1911.13214), their dynamic programme
for persistent schedules.

Stages 0 … n − 1 run forward, then backward from the last to the first. A forward may keep nothing, its input, or all
that its backward needs; what is kept stays until the stage's backward (the schedule is *persistent*). With stage a's
input there, and not counted in the memory m, the least seconds for stages a … b, forward and backward, are the least of

    Σ forward(a … j − 1) + opt(m − w_j, j, b) + opt(m, a, j − 1)        for a < j ≤ b: save the input of j, and run
                                                                        a … j − 1 again, nested, when their turn comes
    forward(a) + backward(a) + opt(m − w̄_a, a + 1, b)                   keep everything of stage a

wherever what is live on the way fits, O(n³·m). It is exact for integer sizes; `solve` measures them in slots.

*On graphs* stages are the intervals between cuts of the topological order. What the plain step holds says what they
take, and the input of stage j costs the bytes that cross its cut and did not cross cut a. The programme gives a plan
for every number of slots; because its model is not the simulation, several of them are turned into schedules, and the
simulated peaks decide.

Limitations: one forward/backward boundary; at most `MOST_STAGES` cuts; everything or nothing of a stage is kept
(Rockmate offers several options for each); schedules that evict a saved input before its use are left out, as in the
paper.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from remat_opt.graph.tables import min_along
from remat_opt.search.nested import Held, NestedPlan, nested_solution
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.segments import in_slots
from remat_opt.search.stages import Plans, Stages, later_bytes, solve_by_models

MOST_STAGES = 60
SLOTS = 400


@dataclasses.dataclass(frozen=True)
class Model:
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

    def in_slots(self, slot: int) -> Model:
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


class Programme:
    """The table of the least seconds for stages a … b and every memory, with the decisions that lead there."""

    def __init__(self, model: Model, memory: int):
        self.model, self.count = model, len(model.forward)
        self.rooms = np.arange(memory + 1, dtype=np.int32)  # is compared in half the time that 64 bits take
        self.seconds = np.full((self.count, self.count, memory + 1), np.inf)
        self.decision = np.zeros((self.count, self.count, memory + 1), dtype=np.int16)  # 0: keep, k: save a + k's input
        # [a, j]: of the forward of a … j, summed up from a on
        self.forward = np.cumsum(np.triu(np.tile(model.forward, (self.count, 1))), axis=1)
        for length in range(self.count):
            self._decide(np.arange(self.count - length), length)

    def _decide(self, a: np.ndarray, length: int) -> None:
        """For all stages a … a + `length` at once."""
        model, rooms, b = self.model, self.rooms, a + length
        table = np.empty((1 + length, len(a), len(rooms)))  # [0]: keep, [k]: save the input of stage a + k
        left = rooms - model.kept[a, None]
        least = np.maximum(model.keeping[a] + model.gradient[b], model.reversing[a])
        behind = self.seconds[a[:, None] + 1, b[:, None], np.maximum(left, 0)] if length else 0.0
        time = (model.forward[a] + model.backward[a])[:, None] + behind
        table[0] = np.where((rooms >= least[:, None]) & (left >= 0), time, np.inf)
        if length:
            splits = a + np.arange(1, length + 1)[:, None]
            saved = model.saved[a, splits]
            least = np.maximum(model.swept[a, splits] + model.gradient[b], saved)
            least = np.minimum(least, len(rooms)).astype(rooms.dtype)
            start = (splits * self.count + b) * len(rooms) - saved  # of [split, b, room - saved]
            # What would start before the table has no room, wherever it starts.
            behind = sliding_window_view(self.seconds.ravel(), len(rooms))[np.maximum(start, 0)]
            times = np.add(behind, self.forward[a, splits - 1][..., None], out=table[1:])
            times += self.seconds[a, splits - 1]
            np.copyto(times, np.inf, where=rooms < least[..., None])
        self.seconds[a, b], self.decision[a, b] = min_along(table)

    def memories(self) -> list[int]:
        """Each memory that takes less time than the one below it."""
        best = self.seconds[0, -1]
        return [m for m in range(len(best)) if best[m] < (best[m - 1] if m else np.inf)]

    def plan(self, memory: int) -> NestedPlan:
        """The plan that the decisions for a memory lead to."""
        sweeps: list[Held] = []
        inputs: list[int] = []
        kept: list[int] = []
        todo = [(0, self.count - 1, memory)]  # stages a … b within a memory, the next at the end
        while todo:
            a, b, room = todo.pop()
            inputs.append(a)  # the backward reads what a kept stage has read
            split = a + int(self.decision[a, b, room])
            if split > a:
                todo += [(a, split - 1, room), (split, b, room - int(self.model.saved[a, split]))]
                continue
            kept.append(a)
            if b > a:
                todo.append((a + 1, b, room - int(self.model.kept[a])))
            else:  # backward runs are next, and before the one of a stage that is not kept another sweep
                sweeps.append(Held(tuple(inputs), tuple(kept)))
                inputs, kept = [], []
        return NestedPlan(sweeps[0], {stage: held for held in sweeps[1:] for stage in held.stages})


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    return solve_by_models(problem, budget, MOST_STAGES, models_of_graph, nested_plans)


def nested_plans(stages: Stages, model: Model, capacity: int) -> Plans:
    """The programme's plans for every number of slots in a memory.

    A search looks at a few of hundreds: a plan is read out of the programme's decisions when it is asked for.

    Args:
        stages: of the step.
        model: what they take.
        capacity: the memory in bytes.
    """
    slot = max(1, -(-capacity // SLOTS))
    programme = Programme(model.in_slots(slot), -(-capacity // slot))
    memories = programme.memories()
    del programme.seconds  # five sixths of the table; plans follow the decisions
    return Plans(
        np.array(memories, dtype=np.int64) * slot,
        lambda index: nested_solution(stages, programme.plan(memories[index])),
    )


def models_of_graph(stages: Stages) -> tuple[Model, Model, Model]:
    """What the stages take, and twice what they may take instead.

    The second adds what was made behind a stage and is still there when it runs backward in the plain step; where
    backward ops of several stages mix, that may be too much. The third halves what backward runs need beyond what is
    kept, because their most may come together with less of the rest than the plain step's order says.
    """
    costs, cuts, count = stages.costs, stages.cuts, len(stages)
    one = np.arange(count)  # stage a alone is [a, a + 1]
    kept = costs.kept[one, one + 1]
    keeping = costs.forward[one, one + 1]
    keeping[-1:] = kept[-1:]
    reversing = costs.backward[one, one + 1]
    later, residuals = later_bytes(stages)
    model = Model(
        forward=np.diff(cuts.seconds[[*cuts.positions, cuts.forward_end]]),
        backward=np.zeros(count),  # once in every plan
        saved=costs.crossing[:, :count],
        swept=_swept(stages),
        kept=kept,
        keeping=keeping,
        reversing=reversing,
        gradient=later - residuals,
    )
    later_too = dataclasses.replace(model, reversing=reversing + residuals, gradient=later)
    least = np.minimum(reversing, model.kept)
    halved = dataclasses.replace(model, reversing=(least + reversing) // 2, gradient=model.gradient // 2)
    return model, later_too, halved


def _swept(stages: Stages) -> np.ndarray:
    """[a, j], most bytes live of what a … j − 1 make, where only what later forward ops read is held."""
    forward_end, lives = stages.cuts.forward_end, stages.problem.plain.liveness.lives
    made = np.flatnonzero((lives.size > 0) & (lives.birth < forward_end))
    read = np.append(lives.reads, 0)  # reduceat wants an index even for the empty list at the end
    last = np.maximum.reduceat(np.where(read < forward_end, read, -1), lives.reads_start[:-1])
    last = np.where(lives.read_counts > 0, last, -1)
    birth = lives.birth[made]
    return stages.costs.peaks_of(birth, np.maximum(last[made], birth), lives.size[made])[:, : len(stages)]
