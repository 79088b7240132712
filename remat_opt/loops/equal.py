"""Which pairs of loops are equal, so that what one of them can be holds for the other, too."""

from __future__ import annotations

from collections.abc import Hashable

from remat_opt.loops.body import Atom
from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.pairs import Pair
from remat_opt.loops.update import Update
from remat_opt.trace import compat
from remat_opt.trace.fingerprint import fingerprint
from remat_opt.trace.inline import Constant, Program


def pair_key(program: Program, pair: Pair, update: Update | None) -> Hashable:
    """The same for two pairs of a program whose bytes, FLOPs and seconds are the same however they are written."""

    def constant(atom: Atom) -> Hashable:
        """What depends on no input is made afresh in the body, and so are literals; all else only has a size."""
        if isinstance(atom, Constant):
            return "literal", str(atom.aval), str(atom.value)
        return atom if atom in program.constant else str(program.avals[atom])

    def size(atom: Atom) -> str:
        return str(program.aval_of(atom))

    loops = []
    for loop in (pair.forward, pair.backward):
        numbers = [*loop.body.inputs, *(x if isinstance(x, int) else None for x in loop.body.outputs)]
        for equation in loop.body.equations:
            numbers += (x if isinstance(x, int) else None for x in (*equation.inputs, *equation.outputs))
        results = tuple(str(program.avals[value]) for value in loop.equation.outputs)
        operands = (*map(constant, loop.constants), *map(size, (*loop.first_carry, *loop.xs)))
        loops.append((fingerprint(loop.body), tuple(numbers), operands, results))
    handed_over = (tuple(sorted(pair.consumed.items())), pair.residual_ys, pair.kept_ys)
    return (*loops, pair.length, pair.forward.reverse, handed_over, update and update.gradients)


def written_alike(plan: PairPlan) -> Hashable:
    """The same for two pairs of a program whose new loops differ in nothing but their operands.

    Unique where that is not known: with updates, and where names tell devices which pair is recomputed.
    """
    if plan.update is not None or plan.program.marks is not None:
        return plan
    loops = (plan.pair.forward.equation, plan.pair.backward.equation)
    atoms = [atom for loop in loops for atom in (*loop.inputs, *loop.outputs)]
    numbers: dict[Atom, int] = {}
    return (
        pair_key(plan.program, plan.pair, None),
        plan.choice,
        tuple(numbers.setdefault(atom, len(numbers)) for atom in atoms),
        tuple(str(atom.value) if isinstance(atom, Constant) else atom in plan.read_later for atom in atoms),
        tuple(compat.place_of(loop.source_info) for loop in loops),
    )
