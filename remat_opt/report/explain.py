"""`explain`: what is saved, what is recomputed, why, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness, simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.loops.choose import WrittenPair
from remat_opt.planner.decision import Decision
from remat_opt.planner.plan import Plan
from remat_opt.report.curves import Curve, curve_of
from remat_opt.report.saved import Group, held_values, saved_groups
from remat_opt.targets.devices import TARGETS
from remat_opt.trace.flops import note_of_loops


@dataclasses.dataclass(frozen=True)
class Repeated:
    """All repeats of one primitive: how many, their FLOPs, and their estimated seconds on the target."""

    primitive: str
    count: int
    flops: float
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Explanation:
    """What a plan saves and recomputes. Prints as text; `.save("picture.png")` draws it.

    Attributes:
        plan: what was decided.
        given: the step as it was given.
        graph: the step that was planned, with its loops and pooling rewritten.
        plain: the simulated step with everything saved and the updates as early as they can be.
        rewritten: the simulated plan.
        names: name of each saved value.
        seconds: time spent on each stage of planning.
        loops: pairs of forward and backward loops that are written again.
        flops_note: what the FLOPs leave out, as a sentence; may be empty.
    """

    plan: Plan
    given: Graph
    graph: Graph
    plain: Liveness
    rewritten: Liveness
    names: Mapping[int, str]
    seconds: Mapping[str, float]
    loops: tuple[WrittenPair, ...] = ()
    flops_note: str = ""

    @functools.cached_property
    def before(self) -> Curve:
        """Live memory over the step as it was given, in its own order."""
        schedule = save_everything(self.given)
        return curve_of(self.given, schedule, simulate(self.given, schedule))

    @functools.cached_property
    def after(self) -> Curve:
        """Live memory over the planned step; the same as `before` where nothing is recomputed."""
        return self.before if self.plan.is_plain else curve_of(self.graph, self.plan.schedule, self.rewritten)

    @property
    def peak_bytes(self) -> int:
        """Peak of the planned step's temporary memory: the compiler's figure, where it was compiled, else predicted."""
        return self.plan.measured.temp_bytes if self.plan.measured else self.plan.predicted.peak_bytes

    @property
    def xla_limit_bytes(self) -> int | None:
        """Temporary memory above which XLA recomputes on its own; None where that is not known."""
        if self.plan.measured is not None:
            return self.plan.measured.xla_limit_bytes
        arrays = [*self.given.inputs, *(set(self.given.outputs) - {output for _, output in self.given.aliases})]
        target = TARGETS.get(self.plan.target)
        return target and target.xla_limit(sum(self.given.sizes[value] for value in arrays))

    @functools.cached_property
    def held(self) -> Mapping[int, str]:
        """Names of the saved tensors that are live when a recomputation begins; the others cost nothing."""
        return {value: self.names[value] for value in held_values(self.plan, self.rewritten, self.names)}

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes of all tensors in `held`."""
        return sum(self.graph.sizes[value] for value in self.held)

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The tensors in `held` in groups of similar ones, those with the most bytes first."""
        return saved_groups(self.plan, self.graph, self.held)

    @functools.cached_property
    def segments(self) -> list[int]:
        """The number of operations in each recomputed segment, in the order in which they run."""
        return [len(run.ops) for run in self.plan.schedule.runs if run.recomputed]

    @functools.cached_property
    def repeated(self) -> list[Repeated]:
        """What is recomputed, by primitive, those that take most time first."""
        ops: dict[str, list[int]] = {}
        for op in self.plan.schedule.recomputed:
            ops.setdefault(self.graph.ops[op].name, []).append(op)
        totals = [
            Repeated(
                name,
                len(repeats),
                sum(self.graph.ops[op].flops for op in repeats),
                sum(self.graph.ops[op].seconds for op in repeats),
            )
            for name, repeats in ops.items()
        ]
        return sorted(totals, key=lambda total: (-total.seconds, -total.flops, total.primitive))

    def __str__(self) -> str:
        from remat_opt.report.text import to_text  # it reads explanations, so it is imported after this class

        return to_text(self)

    def save(self, path: str | Path) -> None:
        """Draw live memory over the step, before and after, into a file; its ending says which format.

        Raises:
            ImportError: matplotlib is not installed; the message says what to install.
        """
        from remat_opt.report.pictures import draw_live_memory

        draw_live_memory(self, path)


def explain(decision: Decision) -> Explanation:
    """Build the explanation of a decision."""
    prepared, solution = decision.prepared, decision.solution
    return Explanation(
        plan=decision.plan,
        given=prepared.plain_graph,
        graph=prepared.problem.graph,
        plain=prepared.unchanged.problem.plain.liveness,
        rewritten=solution.liveness,
        names=prepared.names(solution.choice),
        seconds=dict(decision.seconds),
        loops=prepared.loops.written if prepared.given and prepared.loops else (),
        flops_note=note_of_loops(prepared.captured.given),
    )
