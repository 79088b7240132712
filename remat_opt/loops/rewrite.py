"""`rewrite_loops`: rewrites the pairs of scans of a flat program."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax

from remat_opt.graph.cost import Rates
from remat_opt.loops.body import Atom
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.costs import PairCosts
from remat_opt.loops.equal import written_alike
from remat_opt.loops.forward import run_forward
from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import recomputations
from remat_opt.loops.reverse import ReverseLoop
from remat_opt.loops.steps import Emit, StepSearch
from remat_opt.loops.update import find_update
from remat_opt.trace import compat
from remat_opt.trace.evaluation import read
from remat_opt.trace.inline import BodyFigures, Constant, Equation, Program, values_among
from remat_opt.trace.traced import Tracing, renumbered


def rewrite_loops(
    program: Program,
    pairs: Sequence[Pair],
    chosen: Iterable[tuple[int, LoopChoice]],
    aliases: Sequence[tuple[int, int]] = (),
    *,
    separate_slices: bool = False,
    steps: StepSearch | None = None,
    rates: Rates | None = None,
) -> Program:
    """Rewrite pairs of scans.

    Args:
        program: the flat step.
        pairs: as `find_pairs` gives them.
        chosen: for some of the pairs, by position, what is to be done.
        aliases: (input, output) pairs of the program that share one buffer, because the input was donated.
        separate_slices: slices of stacks that are updated in place get buffers of their own, so that no kernel reads
            the stack when it has been overwritten: a compiler that does not see this copies the whole stack at each
            step.
        steps: schedules steps of reverse loops, where a choice says so.
        rates: the target, for what the program is to know of the loops' seconds and workspaces; None for nothing.

    Returns:
        The program with the same inputs and outputs. Values of equations that were not touched keep their numbers.
    """
    splicing = Splicing(program)
    chosen = tuple(chosen)
    for at, choice in chosen:
        splicing.write_pair(pairs[at], choice, aliases, pairs, separate_slices, steps)
        if rates is not None:
            splicing.note_figures(pairs[at], choice, rates, steps)
    return splicing.result() if chosen else program


class Splicing:
    """A program in which some equations are replaced by what functions do, traced."""

    def __init__(self, program: Program):
        self.program = program
        self.tracing = Tracing(program.avals, program.constants)
        self.instead: dict[int, list[Equation]] = {i: [e] for i, e in enumerate(program.equations)}
        self.parts: dict[Hashable, Program] = {}  # what was traced; once for pairs that are `written_alike`
        self.keys: dict[int, Hashable] = {}  # of reverse loops, by index
        self.figures: dict[Hashable, tuple[BodyFigures, BodyFigures]] = {}  # of both loops, by key
        self.run_once: set[int] = set()
        self.bodies: dict[int, BodyFigures] = {}
        self.renamed: dict[int, Atom] = {}  # values whose equation is gone -> what holds them now

    def write_pair(
        self,
        pair: Pair,
        choice: LoopChoice,
        aliases: Sequence[tuple[int, int]],
        pairs: Sequence[Pair],
        separate_slices: bool = False,
        steps: StepSearch | None = None,
    ) -> None:
        """Put a pair's two loops in the place of its scans."""
        program = self.program
        update = find_update(program, pair, aliases, pairs) if choice.update else None
        absorbed = {pair.backward_index, *(update.equations if update else ())}
        read_later = program.returned | {
            v for v, readers in program.readers.items() if not absorbed.issuperset(readers)
        }
        repeats = recomputations(pair, choice)
        plan = PairPlan(program, pair, choice, repeats, update, read_later, separate_slices, steps)
        # The reverse loop may read results of the forward loop that nothing else reads: a stack that is handed back.
        plan = dataclasses.replace(plan, read_later=plan.read_later.union(plan.reverse_operands))

        key = written_alike(plan)
        operands = pair.forward.equation.reads

        def forward(values: Sequence[Any]) -> list[Any]:
            results, handed_over = run_forward(plan, dict(zip(operands, values, strict=True)))
            return [*results, *handed_over]

        made = self.trace(pair.forward_index, forward, operands, (key, "forward"))
        results, handed_over = made[: len(plan.forward_results)], made[len(plan.forward_results) :]
        self.rename(plan.forward_results, results)

        reads = plan.reverse_operands

        def reverse(values: Sequence[Any]) -> list[Any]:
            return ReverseLoop(plan, dict(zip(reads, values, strict=False)), values[len(reads) :]).run()

        # Two levels are two loops, which hand stacks from one to the other in place: one operation to all others. So
        # is a loop with what is fetched for its first step.
        written = in_one_equation(reverse) if choice.is_several_operations else reverse
        made = self.trace(pair.backward_index, written, [*reads, *handed_over], (key, "reverse"))
        self.rename(plan.reverse_results, made)
        for index in absorbed - {pair.backward_index}:
            self.instead[index] = []
        self.keys[pair.backward_index] = key

    def note_figures(self, pair: Pair, choice: LoopChoice, rates: Rates, steps: StepSearch | None) -> None:
        """Keep what cannot be read off what was written: seconds, as our barriers and parts of pools hide what is one
        kernel, and what a reverse loop needs whose steps are scheduled, or which lets go of stacks before it is done.
        """
        key = self.keys[pair.backward_index]
        if key not in self.figures:
            costs = PairCosts(pair, self.program, rates, None, steps)
            is_hidden = steps is not None and (choice.step_bytes is not None or choice.is_several_operations)
            workspace = costs.memory(choice)[1] if is_hidden else None
            out, back = costs.stalls(choice)
            forward = costs.forward_seconds(choice) * pair.length + out if out else None
            self.figures[key] = (
                BodyFigures(None, forward),
                BodyFigures(workspace, costs.reverse_seconds(choice) + back),
            )
        for index, figures in zip((pair.forward_index, pair.backward_index), self.figures[key], strict=True):
            regions = [one for one in self.instead[index] if compat.jaxprs_in(one.params)]
            if len(regions) == 1 and figures != BodyFigures():
                self.bodies[regions[0].outputs[0]] = figures

    def trace(self, index: int, emit: Emit, operands: Sequence[Atom], key: Hashable) -> list[Atom]:
        """Put what is done on some operands in the place of an equation; the values of the results.

        It is traced once for all that have the same key.
        """
        if key not in self.parts:
            equation = self.program.equations[index]
            self.parts[key] = self.tracing.traced(lambda *values: emit(values), equation, operands)
        self.instead[index], results = self.tracing.placed(self.parts[key], operands)
        for equation in self.instead[index]:
            if compat.jaxprs_in(equation.params):
                self.run_once.update(equation.outputs)
        return results

    def replace(self, index: int, emit: Emit, figures: BodyFigures) -> None:
        """Put what gives the same results, as one equation with a body, in the place of an equation."""
        old = self.program.equations[index]

        def on_operands(values: Sequence[Any]) -> list[Any]:
            environment = dict(zip(old.reads, values, strict=True))
            return emit([read(atom, environment) for atom in old.inputs])

        self.rename(old.outputs, self.trace(index, on_operands, old.reads, index))
        if figures != BodyFigures():
            (region,) = (e for e in self.instead[index] if compat.jaxprs_in(e.params))
            self.bodies[region.outputs[0]] = figures

    def rename(self, values: Sequence[int], atoms: Sequence[Atom]) -> None:
        for value, atom in zip(values, atoms, strict=True):
            aval = atom.aval if isinstance(atom, Constant) else self.tracing.avals[atom]
            old = self.program.avals[value]
            if (aval.shape, aval.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"expected a value like {old.str_short()}, the rewritten loop makes {aval.str_short()}"
                )
            self.renamed[value] = atom

    def result(self) -> Program:
        """The program with all that was put into it."""
        for value, atom in self.renamed.items():  # what holds a value now may be a result that was renamed itself
            while not isinstance(atom, Constant) and atom in self.renamed:
                atom = self.renamed[atom]
            self.renamed[value] = atom
        equations = [
            renumbered(equation, self.renamed) for index in sorted(self.instead) for equation in self.instead[index]
        ]
        outputs = tuple(self.renamed.get(x, x) if isinstance(x, int) else x for x in self.program.outputs)
        return dataclasses.replace(
            self.program,
            avals=tuple(self.tracing.avals),
            constants=tuple(self.tracing.constants),
            equations=in_topological_order(equations, outputs),
            run_once=self.program.run_once | self.run_once,
            bodies=(*self.program.bodies, *self.bodies.items()),
            outputs=outputs,
        )


def in_one_equation(emit: Emit) -> Emit:
    """What evaluates the same as one equation, which keeps what nobody needs out of it: a region that is recomputed."""

    def whole(values: Sequence[Any]) -> list[Any]:
        jaxpr = compat.without_dead_code(jax.make_jaxpr(lambda *x: emit(x))(*values))
        inputs = [*compat.constants_of(jaxpr), *values]
        return compat.bind_remat(compat.open_jaxpr(jaxpr), inputs, [False] * len(inputs), None)

    return whole


def in_topological_order(equations: Sequence[Equation], outputs: Sequence[Atom]) -> tuple[Equation, ...]:
    """Equations in their order, but each after those it reads from, without those that nothing needs."""
    producer = {value: index for index, equation in enumerate(equations) for value in equation.outputs}

    def before(atoms: Iterable[Atom]) -> list[int]:
        return [producer[x] for x in values_among(atoms) if x in producer]

    alive: set[int] = set()
    stack = before(outputs)
    stack += [index for index, equation in enumerate(equations) if equation.effects]
    while stack:
        index = stack.pop()
        if index not in alive:
            alive.add(index)
            stack += before(equations[index].inputs)
    ordered: list[Equation] = []
    done: set[int] = set()
    for first in sorted(alive):
        stack = [first]
        while stack:
            index = stack[-1]
            missing = [one for one in before(equations[index].inputs) if one not in done]
            if index in done or not missing:
                stack.pop()
                if index not in done:
                    done.add(index)
                    ordered.append(equations[index])
            else:
                stack.extend(sorted(missing, reverse=True))
    return tuple(ordered)
