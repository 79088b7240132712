"""Zeros that loops begin with: a compiler makes them apart from the loop, whose stacks then lie there."""

from __future__ import annotations

from typing import Any

from remat_opt.compilers.reader import Reader
from remat_opt.graph.graph import Op
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation
from remat_opt.program.masks import is_zero


class LoopReader(Reader):
    """Gives loops places of zeros.

    Attributes:
        begun: the places, each with a result of its loop, by shape and type; who makes them is for the platform to say.
        makes_zeros_at_once: whether zeros are made apart; else each loop is taken to make its own.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.begun: dict[tuple, dict[int, int]] = {}
        self.makes_zeros_at_once = True

    def with_places(self, equation: Equation, loop: Op) -> Op:
        """A loop that changes zeros into its stacks, and into what it carries that begins as zeros. Stacks of the same
        values are one (`while_loop_simplifier.cc`, repeated indices of a tuple)."""
        if not self.makes_zeros_at_once:
            return loop
        constants, carries = compat.scan_counts(equation.params)
        results = {x for x in self.program.outputs if isinstance(x, int)}
        *_, token = loop.outputs
        made = [id(x) for x in compat.bare_jaxpr(equation.params["jaxpr"]).outvars]
        stack_of: dict[int, int] = {}
        places: dict[int, int] = {}
        for at, output in enumerate(equation.outputs):
            is_begun = at >= carries or self.is_zeros(equation.inputs[constants + at])
            if not is_begun or output not in loop.outputs or output in results:
                continue
            place = stack_of.get(made[at]) if at >= carries else None
            if place is None:
                place = self.new(self.sizes[output])
                self.changed.add(place)
                aval = self.program.avals[output]
                self.begun.setdefault((aval.shape, aval.dtype), {})[place] = token
            if at >= carries:
                stack_of[made[at]] = place
            places[output] = place
            self.same[output] = (place, token)
        kept = tuple(value for value in loop.outputs if value not in places)
        return loop.but(inputs=(*loop.inputs, *dict.fromkeys(places.values())), outputs=kept)

    def is_zeros(self, first: int | Constant) -> bool:
        """Whether what a loop carries at first is zeros."""
        return (isinstance(first, Constant) or first in self.constants) and is_zero(self.number_in(first))
