"""Emits a schedule of the whole step (forward, backward and optimizer) as JAX operations.

A recomputed run becomes the same equation as a differentiated `jax.checkpoint`: one `remat_p`, whose lowering passes
its inputs through an `optimization_barrier`. The cotangents that the run waits for go through the same barrier and come
out as results, so that the compiler cannot run it before they exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as P

from remat_opt.emit.host_copies import HostCopies
from remat_opt.emit.zeros import are_worth_a_barrier, loop_with_late_stacks, may_wait, zeros_after
from remat_opt.graph.barriers import Barrier, barriers
from remat_opt.graph.build import Bridge
from remat_opt.graph.cpu_barriers import cpu_barriers
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import overwritten_operands, simulate
from remat_opt.graph.schedule import Schedule
from remat_opt.graph.timeline import Crossing, guards, timeline
from remat_opt.rewrites.masks import is_zero
from remat_opt.rewrites.slices import Slice, at_once
from remat_opt.trace import compat
from remat_opt.trace.evaluation import bind, make_on_demand
from remat_opt.trace.inline import Constant, Equation, scope_of
from remat_opt.trace.platforms import GPUS


def write(
    bridge: Bridge,
    schedule: Schedule,
    saved_names: dict[int, str],
    arguments: Sequence[Any],
    *,
    is_step_of_loop: bool = False,
) -> list[Any]:
    """Evaluate the schedule on arguments or tracers.

    Args:
        bridge: the graph and its equations.
        schedule: what runs when.
        saved_names: for each saved value the `checkpoint_name` it carries.
        arguments: one value for each input of the program, or a slice that can be read again.
        is_step_of_loop: the program is one step of a reverse loop, whose order matters from its beginning.

    Returns:
        One value for each output of the program.
    """
    return _Writer(bridge, saved_names, is_step_of_loop).run(schedule, arguments)


class _Writer:
    def __init__(self, bridge: Bridge, saved_names: dict[int, str], is_step_of_loop: bool):
        self.bridge = bridge
        self.program = bridge.program
        self.saved_names = saved_names
        self.is_step_of_loop = is_step_of_loop
        self.slices: dict[int, Slice] = {}
        self.policy = jax.checkpoint_policies.save_only_these_names(*sorted(set(saved_names.values())))
        self.given: dict[int, Any] = {}
        self.environment: dict[int, Any] = {}
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.sources: dict[int, frozenset[int]] = {}  # of what was made on demand: stored values and inputs
        self.made_of: dict[int, list[int]] = {}  # the way back
        self.run_index = 0
        self.place = 0  # of the next op in the schedule's order
        self.copies = HostCopies(bridge.graph, Schedule(()))
        self.in_one_barrier = dict(bridge.program.in_one_barrier)
        self.gathered = self.read_whole() if bridge.program.gathers_once else frozenset()
        self.is_for_gpu = bridge.platform in GPUS
        is_divided = bridge.program.marks is not None
        # Of several devices each type says more than shape and numbers, and a TPU's compiler keeps the order written.
        self.zeros_are_late = bridge.platform != "tpu" and not is_divided
        # XLA's SPMD partitioner gathers what a layout constraint reads.
        self.updated = self.written_over() if self.is_for_gpu and not is_divided else frozenset()
        self.before_barriers: dict[int, Any] = {}  # values that have gone through barriers, as they were made
        self.overwritten: dict[tuple[int, int], int] = {}  # by run and op the operand that the result is written over

    def written_over(self) -> frozenset[int]:
        """Outputs that take the place of a donated argument.

        XLA's GPU compiler gives the gradient of a weight the layout that its convolution likes, and with it the updated
        weight, from its update to the end of the step: a copy of all weights in addition to the donated ones.
        """
        return frozenset(output for _, output in self.bridge.graph.aliases)

    def read_whole(self) -> frozenset[int]:
        """What devices may have to gather: inputs, and casts of them, that something other than elementwise work reads,
        with the inputs of the casts."""
        ops, found, casts = self.bridge.graph.ops, set(self.program.inputs), []
        for op in ops:
            if _is_cast(self.bridge.graph, op, found):
                found.update(op.outputs)
                casts.append(op)
        read = found.intersection(value for op in ops if op.kind is not Kind.ELEMENTWISE for value in op.inputs)
        for op in reversed(casts):
            read.update(op.inputs if read.intersection(op.outputs) else ())
        return frozenset(read)

    def run(self, schedule: Schedule, arguments: Sequence[Any]) -> list[Any]:
        given = dict(zip(self.program.inputs, arguments, strict=True))
        self.slices = {value: argument for value, argument in given.items() if isinstance(argument, Slice)}
        self.given = {value: at_once(argument) for value, argument in given.items()}
        self.environment.update(self.given)
        self.environment.update(self.program.constants)
        self.guards = guards(self.bridge.graph, schedule)
        liveness = simulate(self.bridge.graph, schedule)
        self.overwritten = overwritten_operands(schedule, liveness)
        if self.is_for_gpu:
            slices = self.slices.keys() if self.is_step_of_loop else None
            self.barriers = barriers(self.bridge.graph, schedule, liveness, slices)
        elif self.bridge.platform == "cpu":
            self.barriers = cpu_barriers(self.bridge.graph, schedule, liveness)
        self.copies = HostCopies(self.bridge.graph, schedule)
        stages = timeline(self.bridge.graph, schedule)
        handed_on: dict[int, Any] = {}
        for index, (stage, next_stage) in enumerate(itertools.zip_longest(stages, stages[1:])):
            self.run_index = index
            if stage.crossing is None:
                self.evaluate(stage.run.ops, self.environment, handed_on, first_run=True)
                handed_on = {}
            else:
                follows = () if next_stage is None or next_stage.crossing else next_stage.run.ops
                self.copy(stage.crossing.reads, handed_on)
                handed_on = self.recompute(stage.run.ops, stage.crossing, follows)
                self.place += len(stage.run.ops)
                self.copies.note_made(stage.crossing.makes, self.environment)
        on_demand: dict[int, Any] = {}
        return [self.read(atom, self.environment, on_demand) for atom in self.program.outputs]

    def evaluate(
        self, ops: Sequence[int], environment: dict[int, Any], on_demand: dict[int, Any], *, first_run: bool
    ) -> None:
        """Run ops; what no op stands for is made once in a run, and added to `on_demand`."""
        for op in ops:
            equation = self.program.equations[self.bridge.equation_of[op]]
            over, tied = None, []
            if first_run:
                over = self.overwritten.get((self.run_index, op))
                tied = self.copy(self.bridge.graph.ops[op].inputs, on_demand, over)
                self.place += 1
            if first_run and op in self.guards:
                self.through_barrier(self.guards[op], environment, on_demand)
            barrier = self.barriers.get((self.run_index, op))
            if barrier and barrier.is_alone:
                alone = {value: lax.optimization_barrier(environment[value]) for value in barrier.operands}
                results = self.bind(equation, {**environment, **alone}, {}, recomputed=not first_run)
            else:
                if barrier:
                    self.wait(barrier, environment, on_demand)
                tied += barrier.operands if barrier else ()
                if over is not None and over in self.before_barriers and over not in tied:
                    environment[over] = self.before_barriers[over]
                    self.drop_made_of([over], on_demand)
                results = self.bind(equation, environment, on_demand, recomputed=not first_run)
            environment.update(zip(equation.outputs, results, strict=True))
            for value in self.bridge.behind_barriers.intersection(equation.outputs):
                other = self.in_one_barrier.get(value)
                values = [value] if other is None or other not in environment else [value, other]
                self.through_barrier(values, environment, on_demand)
            if first_run:
                self.drop_before_barriers(equation.outputs)
                for value in self.updated.intersection(equation.outputs):
                    environment[value] = compat.with_default_layout(environment[value])
                for value in self.saved_names.keys() & set(equation.outputs):
                    environment[value] = compat.name_p.bind(environment[value], name=self.saved_names[value])
                self.given.update((value, environment[value]) for value in self.gathered.intersection(equation.outputs))
                self.copies.note_made(equation.outputs, environment)

    def copy(self, reads: Sequence[int], on_demand: dict[int, Any], over: int | None = None) -> list[int]:
        """Wait for copies to the host that have to be done, and begin copies back, before an op or a run.

        Args:
            reads: what the op or the run reads.
            on_demand: see `evaluate`.
            over: the operand that the op writes its result over, if there is one.

        Returns:
            What has gone through a barrier, by which the op waits.
        """
        waits = self.copies.waits_for(self.place, reads, over)
        for values in (waits, self.copies.begins_at(self.place)):
            if values:
                self.through_barrier(values, self.environment, on_demand)
        back = self.copies.bring_back(self.place, self.environment)
        self.drop_before_barriers(back)
        self.drop_made_of(back, on_demand)
        return waits

    def wait(self, barrier: Barrier, environment: dict[int, Any], on_demand: dict[int, Any]) -> None:
        slices = sorted(self.slices.keys() & barrier.operands)
        for value in slices:
            self.reread(value, barrier.results, environment)
        values = (*(value for value in barrier.operands if value not in self.slices), *barrier.results)
        self.through_barrier(values, environment, on_demand)
        self.drop_made_of(slices, on_demand)

    def through_barrier(self, values: Sequence[int], environment: dict[int, Any], on_demand: dict[int, Any]) -> None:
        """Take values through one barrier; they are read as its results from then on."""
        results = lax.optimization_barrier([environment[value] for value in values])
        if environment is self.environment:
            self.keep_before_barriers(values)
        environment.update(zip(values, results, strict=True))
        self.drop_made_of(values, on_demand)

    def keep_before_barriers(self, values: Iterable[int]) -> None:
        """Remember values as they were made: what has gone through a barrier is no operand of the kernel's own, and the
        compiler writes no result over it. So the kernel that does so by the schedule, the last to read a value, reads
        it as it was."""
        for value in values:
            self.before_barriers.setdefault(value, self.environment[value])

    def drop_before_barriers(self, values: Iterable[int]) -> None:
        """Values are made afresh, or must not be read but behind a barrier."""
        for value in values:
            self.before_barriers.pop(value, None)

    def drop_made_of(self, values: Iterable[int], on_demand: dict[int, Any]) -> None:
        """What was made on demand of values as they were in front of a barrier."""
        for value in values:
            for made in self.made_of.get(value, ()):
                on_demand.pop(made, None)

    def reread(self, value: int, after: Sequence[int], environment: dict[int, Any]) -> None:
        """Read a slice from its stack when some values have been computed."""
        environment[value], values = self.slices[value].after([environment[one] for one in after])
        environment.update(zip(after, values, strict=True))

    def bind(
        self, equation: Equation, environment: dict[int, Any], on_demand: dict[int, Any], *, recomputed: bool = False
    ) -> list[Any]:
        inputs = [self.read(atom, environment, on_demand) for atom in equation.inputs]
        if self.zeros_are_late and equation.primitive is P.scatter_add_p and self.is_zeros(equation.inputs[0]):
            aval = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
            if are_worth_a_barrier([aval]):
                (inputs[0],), inputs[2] = zeros_after([aval], inputs[2])
        scope = scope_of(self.program, equation) if recomputed else None
        if equation.primitive is P.scan_p and (awaited := self.awaited_by(equation)):
            with compat.equation_context(equation.source_info, equation.context, scope):
                return loop_with_late_stacks(equation.params, inputs, awaited)
        return bind(equation, inputs, scope)

    def awaited_by(self, equation: Equation) -> range:
        """Operands of a loop that its stacks are to wait for: what it starts from, and what it goes through."""
        if not self.is_for_gpu or not self.zeros_are_late or not may_wait(equation):
            return range(0)
        constants, _ = compat.scan_counts(equation.params)
        return range(constants, len(equation.inputs))

    def is_zeros(self, atom: int | Constant) -> bool:
        """Whether an operand is an array of zeros, written in the program."""
        made = None if isinstance(atom, Constant) else self.bridge.on_demand.get(atom)
        if made is None:
            return False
        equation = self.program.equations[made]
        return len(equation.inputs) == 1 and is_zero(equation.inputs[0])

    def read(self, atom: int | Constant, environment: dict[int, Any], on_demand: dict[int, Any]) -> Any:
        if isinstance(atom, Constant):
            return atom.value
        if atom not in self.bridge.on_demand:
            return environment[atom]
        if atom not in on_demand:

            def run(equation: Equation) -> list[Any]:
                self.note_sources(equation)
                return self.bind(equation, environment, on_demand)

            make_on_demand(self.program, self.bridge.on_demand, atom, on_demand, run)
        return on_demand[atom]

    def note_sources(self, equation: Equation) -> None:
        if self.sources.keys() >= set(equation.outputs):
            return
        sources = frozenset().union(*(self.sources.get(value, (value,)) for value in equation.reads))
        for output in equation.outputs:
            self.sources[output] = sources
            for source in sources:
                self.made_of.setdefault(source, []).append(output)

    def recompute(self, ops: Sequence[int], crossing: Crossing, follows: Sequence[int]) -> dict[int, Any]:
        """Recompute ops after a barrier.

        Returns:
            What was made on demand, and the ops of the run that follows without a barrier read too. (A compiler would
            find that both make the same; who counts operations would not.)
        """
        past = self.past_the_barrier(ops, crossing)
        # A gathered array that went through an update's barrier since would be gathered again.
        whole = {value: self.given[value] for value in past}
        if self.slices and crossing.waits:
            slices = self.slices.keys() & crossing.covered
            for value in sorted(slices):
                self.reread(value, crossing.waits[:1], self.environment)
            past |= slices
        covered = [value for value in crossing.covered if value not in past or value in crossing.reads]
        results = (*crossing.makes, *(value for value in crossing.passed_on if value not in past))

        handed_on: list[int] = []

        def segment(*values):
            environment, on_demand = dict(zip(covered, values, strict=True)), {}
            self.evaluate(ops, environment, on_demand, first_run=False)
            handed_on.extend(self.read_on_demand(follows, on_demand))
            return [*(environment[value] for value in results), *(on_demand[value] for value in handed_on)]

        environment = {**self.environment, **whole}
        inputs = [environment[value] for value in covered]
        jaxpr = jax.make_jaxpr(segment)(*inputs)
        constants = compat.constants_of(jaxpr)  # stacks, and a step's number, of what a loop's step reads again
        through = [*(False for _ in constants), *(value not in past for value in covered)]
        outputs = compat.bind_remat(compat.open_jaxpr(jaxpr), [*constants, *inputs], through, self.policy)
        self.drop_before_barriers(crossing.makes)
        self.keep_before_barriers(results[len(crossing.makes) :])
        self.environment.update(zip(results, outputs[: len(results)], strict=True))
        return dict(zip(handed_on, outputs[len(results) :], strict=True))

    def read_on_demand(self, ops: Sequence[int], made: Container[int]) -> list[int]:
        """Which of the values that were made on demand some ops read, or what they have to make on demand reads."""
        found: dict[int, bool] = {}
        stack = [self.bridge.equation_of[op] for op in reversed(ops)]
        while stack:
            for atom in self.program.equations[stack.pop()].reads:
                if atom not in self.bridge.on_demand or atom in found:
                    continue
                found[atom] = atom in made and bool(self.sources[atom])  # constants are made afresh
                if atom not in made:
                    stack.append(self.bridge.on_demand[atom])
        return [atom for atom, is_made in found.items() if is_made]

    def past_the_barrier(self, ops: Sequence[int], crossing: Crossing) -> frozenset[int]:
        """Gathered inputs that a run and what follows it read as they are, so that they are gathered once.

        An op that reads nothing else would be the same as in the first run, and merged with it: the largest of its
        inputs goes through the barrier. A cast is to be merged, as the compiler gathers what it makes.
        """
        graph = self.bridge.graph
        after, made = set(crossing.covered) - self.gathered, set[int]()
        for op in (graph.ops[index] for index in ops if self.gathered):
            made.update(op.outputs)
            if self.gathered.issuperset((*op.inputs, *op.outputs)):
                continue
            if op.inputs and after.isdisjoint(op.inputs):
                after.add(max(op.inputs, key=lambda value: graph.sizes[value]))
            after.update(op.outputs)
        return self.gathered - after - made


def _is_cast(graph: Graph, op: Op, values: Container[int]) -> bool:
    """Whether an op makes no more bytes of some values alone, as of weights in another type."""
    is_small = sum(graph.sizes[value] for value in op.outputs) <= max((graph.sizes[x] for x in op.inputs), default=-1)
    return op.kind is Kind.ELEMENTWISE and is_small and all(value in values for value in op.inputs)
