"""What there is to say of a plan, before it is written as text or drawn."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness, simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.loops.choose import WrittenPair
from remat_opt.planner.plan import Plan, Prediction
from remat_opt.report.curves import Curve, curve_of, host_curve
from remat_opt.report.lives import Life, lives_of
from remat_opt.report.saved import Group, held_values, saved_groups
from remat_opt.targets.devices import TARGETS


@dataclasses.dataclass(frozen=True)
class Repeated:
    """All repeats of one primitive: how many, their FLOPs, and their estimated seconds on the target."""

    primitive: str
    count: int
    flops: float
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Findings:
    """What there is to say of a plan: the figures that its text and its picture show.

    Of a step on several devices the graphs and `Plan.predicted` are of all of them together; bytes and seconds that are
    read here are those of one device, as if all were divided equally, and FLOPs those of all.

    Attributes:
        plan: what was decided.
        original: the original step.
        graph: the step as the plan sees it, with loops and pooling in the forms that we write.
        plain: the simulated step with everything saved and the updates as early as they can be.
        rewritten: the simulated plan.
        names: name of each saved value.
        seconds: time spent on each stage of planning.
        loops: pairs of forward and backward loops that are rewritten.
        flops_note: what has to be known of the FLOPs; empty if nothing.
        devices: on how many the step runs.
        tensors: name of each value.
        loop_ops: what each loop of the planned step is, by its op.
        stacks: bytes of what loops put into the host's memory for another loop, by value.
    """

    plan: Plan
    original: Graph
    graph: Graph
    plain: Liveness
    rewritten: Liveness
    names: Mapping[int, str]
    seconds: Mapping[str, float]
    loops: tuple[WrittenPair, ...] = ()
    flops_note: str = ""
    devices: int = 1
    tensors: Mapping[int, str] = dataclasses.field(default_factory=dict)
    loop_ops: Mapping[int, str] = dataclasses.field(default_factory=dict)
    stacks: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def predicted(self) -> Prediction:
        """The models' figures."""
        found, parts = self.plan.predicted, self.devices
        sizes = ("plain_peak_bytes", "peak_bytes", "saved_bytes", "host_bytes")
        seconds = ("seconds", "extra_seconds", "stall_seconds")
        changed = {name: getattr(found, name) // parts for name in sizes}
        return dataclasses.replace(found, **changed, **{name: getattr(found, name) / parts for name in seconds})

    @property
    def all_saved_peak(self) -> int:
        """Peak of the step with everything saved and the updates as early as they can be."""
        return self.plain.peak // self.devices

    @functools.cached_property
    def before(self) -> Curve:
        """Live memory over the original step, in its own order."""
        schedule = save_everything(self.original)
        return curve_of(self.original, schedule, simulate(self.original, schedule)).share(self.devices)

    @functools.cached_property
    def after(self) -> Curve:
        """Live memory over the planned step; the same as `before` where nothing is recomputed."""
        if self.plan.is_plain:
            return self.before
        return curve_of(self.graph, self.plan.schedule, self.rewritten).share(self.devices)

    @functools.cached_property
    def on_host(self) -> Curve:
        """Bytes in the host's memory over the planned step."""
        return host_curve(self.graph, self.plan.schedule, self.stacks)

    @functools.cached_property
    def lives(self) -> list[Life]:
        """Where the largest tensors of the planned step are, and when."""
        curve = curve_of(self.graph, self.plan.schedule, self.rewritten)
        lives = lives_of(self.graph, self.plan.schedule, self.rewritten, curve, self.tensors, self.stacks)
        return [life.share(self.devices) for life in lives]

    @functools.cached_property
    def loop_times(self) -> list[tuple[float, float, str]]:
        """Begin and end of each run of a loop in the planned step, in seconds, with what it is."""
        schedule = self.plan.schedule
        ends = list(itertools.accumulate(self.graph.ops[op].seconds / self.devices for op in schedule.order))
        begins = [0.0, *ends]
        return [
            (begins[at], ends[at], self.loop_ops[op]) for at, op in enumerate(schedule.order) if op in self.loop_ops
        ]

    @property
    def peak_bytes(self) -> int:
        """Peak of the planned step's temporary memory: the compiler's figure, where it was compiled, else predicted."""
        return self.plan.measured.temp_bytes if self.plan.measured else self.predicted.peak_bytes

    @property
    def xla_limit_bytes(self) -> int | None:
        """Temporary memory above which XLA recomputes on its own; None where that is not known."""
        if self.plan.measured is not None:
            return self.plan.measured.xla_limit_bytes
        if self.devices > 1:
            return None
        arrays = [
            *self.original.inputs,
            *(set(self.original.outputs) - {output for _, output in self.original.aliases}),
        ]
        target = TARGETS.get(self.plan.target)
        return target and target.xla_limit(sum(self.original.sizes[value] for value in arrays))

    @functools.cached_property
    def held(self) -> Mapping[int, str]:
        """Names of the saved tensors that are in memory when something is recomputed; the others cost nothing."""
        return {value: self.names[value] for value in held_values(self.plan, self.rewritten, self.names)}

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes of all tensors in `held`."""
        return sum(self.graph.sizes[value] for value in self.held) // self.devices

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The tensors in `held` in groups of similar ones, those with the most bytes first."""
        groups = saved_groups(self.plan, self.graph, self.held)
        return [dataclasses.replace(group, size=group.size // self.devices) for group in groups]

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
                sum(self.graph.ops[op].seconds for op in repeats) / self.devices,
            )
            for name, repeats in ops.items()
        ]
        return sorted(totals, key=lambda total: (-total.seconds, -total.flops, total.primitive))
