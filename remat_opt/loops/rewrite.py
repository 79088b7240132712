"""`rewrite_loops`: rewrites the pairs of scans of a flat program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from remat_opt.loops.body import Atom
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.constants import constant_equations
from remat_opt.loops.memory import memory_of
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation, joint_step, recomputations
from remat_opt.loops.steps import StepSearch
from remat_opt.loops.update import find_update
from remat_opt.loops.write import PairWriter
from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program, inline


def rewrite_loops(
    program: Program,
    pairs: Sequence[Pair],
    chosen: Iterable[tuple[int, LoopChoice]],
    aliases: Sequence[tuple[int, int]] = (),
    *,
    separate_slices: bool = False,
    steps: StepSearch | None = None,
) -> Program:
    """Write pairs of scans again.

    Args:
        program: the flat step.
        pairs: as `find_pairs` gives them.
        chosen: for some of the pairs, by position, what is to be done.
        aliases: (input, output) pairs of the program that share one buffer, because the input was donated.
        separate_slices: slices of stacks that are updated in place get buffers of their own, so that no kernel reads
            the stack when it has been overwritten: a compiler that does not see this copies the whole stack at each
            step.
        steps: schedules steps of reverse loops, where a choice says so.

    Returns:
        The program with the same inputs and outputs. Values of equations that were not touched keep their numbers.
    """
    splicing = Splicing(program)
    chosen = tuple(chosen)
    for at, choice in chosen:
        splicing.write_pair(pairs[at], choice, aliases, pairs, separate_slices, steps)
    return splicing.result() if chosen else program


class Splicing:
    """A program in which some equations are replaced by what functions do, traced."""

    def __init__(self, program: Program):
        self.program = program
        self.avals = list(program.avals)
        self.constants = {id(constant): value for value, constant in program.constants}
        self.more_constants: list[tuple[int, Any]] = []
        self.instead: dict[int, list[Equation]] = {i: [e] for i, e in enumerate(program.equations)}
        self.constant = constant_equations(program)
        self.run_once: set[int] = set()
        self.workspaces: dict[int, int] = {}
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
        absorbed = set(update.equations) if update else set()
        read_later = {x for x in program.outputs if not isinstance(x, Constant)}
        for index, equation in enumerate(program.equations):
            if index not in (pair.backward_index, *absorbed):
                read_later.update(x for x in equation.inputs if not isinstance(x, Constant))
        repeats = recomputations(pair, choice)
        writer = PairWriter(
            program, pair, choice, repeats, update, self.constant, frozenset(read_later), separate_slices, steps
        )
        # The reverse loop may read results of the forward loop that nothing else reads: a stack that is handed back.
        writer = dataclasses.replace(writer, read_later=writer.read_later.union(writer.reverse_operands))

        operands = values_among(pair.forward.equation.inputs)

        def forward(*values):
            results, handed_over = writer.forward(dict(zip(operands, values, strict=True)))
            return [*results, *handed_over]

        made = self.trace(pair.forward_index, forward, operands)
        results, handed_over = made[: len(writer.forward_results)], made[len(writer.forward_results) :]
        self.rename(writer.forward_results, results)

        reads = writer.reverse_operands

        def reverse(*values):
            return writer.reverse(dict(zip(reads, values[: len(reads)], strict=True)), values[len(reads) :])

        def in_one_equation(*values):
            # Two levels are two loops, which hand stacks from one to the other in place: one operation to all others.
            jaxpr = compat.without_dead_code(jax.make_jaxpr(reverse)(*values))
            free = [*compat.constants_of(jaxpr), *values]
            return compat.bind_remat(compat.open_jaxpr(jaxpr), free, [False] * len(free), None)

        written = reverse if choice.chunk is None else in_one_equation
        self.rename(writer.reverse_results, self.trace(pair.backward_index, written, [*reads, *handed_over]))
        for index in absorbed:
            self.instead[index] = []
        if steps is not None and (choice.step_bytes is not None or choice.chunk is not None):
            self.note_workspace(pair, choice, writer, steps)

    def note_workspace(self, pair: Pair, choice: LoopChoice, writer: PairWriter, steps: StepSearch) -> None:
        """Keep what a reverse loop needs whose steps are scheduled, or which lets go of stacks before it is done: that
        cannot be read off what was written."""

        def peak_of_step(again: Recomputation) -> int:
            costs = steps.costs(joint_step(pair, again, self.program))
            return costs.chosen(choice.step_bytes, is_alone=again is writer.repeats.alone).peak

        _, needed = memory_of(pair, choice, writer.repeats, peak_of_step)
        regions = [one for one in self.instead[pair.backward_index] if compat.jaxprs_in(one.params)]
        if len(regions) == 1:
            self.workspaces[regions[0].outputs[0]] = needed

    def trace(self, index: int, fun: Callable[..., list[Any]], operands: Sequence[Atom]) -> list[Atom]:
        """Put what a function does in the place of an equation.

        Args:
            index: which equation.
            fun: takes one value for each of `operands`.
            operands: values of the program, also new ones.

        Returns:
            The values of the function's results.
        """
        old = self.program.equations[index]

        def in_context(*values):
            with compat.equation_context(old.source_info, old.context):
                return fun(*values)

        avals = [x.aval if isinstance(x, Constant) else self.avals[x] for x in operands]
        closed = compat.without_dead_code(jax.make_jaxpr(in_context)(*avals))
        part = inline(closed, keep_checkpoints=True)
        number: dict[int, Atom] = dict(zip(part.inputs, operands, strict=True))
        for value, constant in part.constants:
            if id(constant) not in self.constants:
                self.constants[id(constant)] = self.new_value(part.avals[value])
                self.more_constants.append((self.constants[id(constant)], constant))
            number[value] = self.constants[id(constant)]
        equations = []
        for equation in part.equations:
            number.update((value, self.new_value(part.avals[value])) for value in equation.outputs)
            equations.append(_renumbered(equation, number))
            if compat.jaxprs_in(equation.params):
                self.run_once.update(equations[-1].outputs)
        self.instead[index] = equations
        return [x if isinstance(x, Constant) else number[x] for x in part.outputs]

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def replace(self, index: int, fun: Callable[..., list[Any]], workspace: int | None = None) -> None:
        """Put a function of an equation's non-literal operands in its place; it gives what the equation gave.

        Args:
            index: which equation.
            fun: what is done instead, as one equation with a body.
            workspace: bytes that its body needs, where that is known.
        """
        old = self.program.equations[index]
        self.rename(old.outputs, self.trace(index, fun, values_among(old.inputs)))
        if workspace is not None:
            (region,) = (e for e in self.instead[index] if compat.jaxprs_in(e.params))
            self.workspaces[region.outputs[0]] = workspace

    def rename(self, values: Sequence[int], atoms: Sequence[Atom]) -> None:
        for value, atom in zip(values, atoms, strict=True):
            aval = atom.aval if isinstance(atom, Constant) else self.avals[atom]
            old = self.avals[value]
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
            _renumbered(equation, self.renamed) for index in sorted(self.instead) for equation in self.instead[index]
        ]
        outputs = tuple(x if isinstance(x, Constant) else self.renamed.get(x, x) for x in self.program.outputs)
        constants = (*self.program.constants, *self.more_constants)
        return dataclasses.replace(
            self.program,
            avals=tuple(self.avals),
            constants=constants,
            equations=in_topological_order(equations, outputs),
            run_once=self.program.run_once | self.run_once,
            workspaces=(*self.program.workspaces, *self.workspaces.items()),
            outputs=outputs,
        )


def in_topological_order(equations: Sequence[Equation], outputs: Sequence[Atom]) -> tuple[Equation, ...]:
    """Equations in their order, but each after those it reads from, without those that nothing needs."""
    producer = {value: index for index, equation in enumerate(equations) for value in equation.outputs}
    needed = {x for x in outputs if not isinstance(x, Constant)}
    alive: set[int] = set()
    stack = [producer[x] for x in needed if x in producer]
    stack += [index for index, equation in enumerate(equations) if equation.effects]
    while stack:
        index = stack.pop()
        if index not in alive:
            alive.add(index)
            stack.extend(producer[x] for x in values_among(equations[index].inputs) if x in producer)
    ordered: list[Equation] = []
    done: set[int] = set()
    for first in sorted(alive):
        stack = [first]
        while stack:
            index = stack[-1]
            missing = [producer[x] for x in values_among(equations[index].inputs) if x in producer]
            missing = [before for before in missing if before not in done]
            if index in done or not missing:
                stack.pop()
                if index not in done:
                    done.add(index)
                    ordered.append(equations[index])
            else:
                stack.extend(sorted(missing, reverse=True))
    return tuple(ordered)


def _renumbered(equation: Equation, number: Mapping[int, Atom]) -> Equation:
    inputs = tuple(x if isinstance(x, Constant) else number.get(x, x) for x in equation.inputs)
    outputs = []
    for value in equation.outputs:
        named = number.get(value, value)
        assert not isinstance(named, Constant)
        outputs.append(named)
    return dataclasses.replace(equation, inputs=inputs, outputs=tuple(outputs))


def values_among(atoms: Sequence[Atom]) -> list[int]:
    """The operands that are no literals, each once."""
    return list(dict.fromkeys(x for x in atoms if not isinstance(x, Constant)))
