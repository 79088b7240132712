"""`explain`: what is saved, what is recomputed, why, and what it costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jax.extend.core import primitives

from remat_opt.planner.decision import Decision
from remat_opt.report.findings import Findings
from remat_opt.report.notebook import to_html
from remat_opt.report.pictures import draw_step, save
from remat_opt.report.text import to_text
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_anywhere
from remat_opt.trace.flops import note_of_loops
from remat_opt.trace.names import name_values


@dataclasses.dataclass(frozen=True, eq=False)
class Explanation(Findings):
    """Prints as text; `.save("plan.png")` draws it. Its attributes are those of `Findings`."""

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(str(self), lambda: draw_step(self))

    def save(self, path: str | Path) -> None:
        """Draw live memory over the step, before and after, into a file; its ending says which format.

        Below it is where the largest tensors are at each time: saved, freed and recomputed, or in the host's memory.

        Raises:
            ImportError: matplotlib is not installed; the message says what to install.
        """
        save(draw_step(self), path)


def explain(decision: Decision, devices: int = 1) -> Explanation:
    """Build the explanation of a decision for a step on so many devices."""
    prepared, solution, bridge = decision.prepared, decision.solution, decision.prepared.bridge
    graph, program = bridge.graph, bridge.program
    names = (_name_of_loop(program.equations[at], prepared.chunks) for at in bridge.equation_of)
    loops = {op: name for op, name in enumerate(names) if name}
    return Explanation(
        plan=decision.plan,
        original=prepared.plain_graph,
        graph=prepared.problem.graph,
        plain=prepared.unchanged.problem.plain.liveness,
        rewritten=solution.liveness,
        names=prepared.names(solution.choice),
        seconds=dict(decision.seconds),
        loops=prepared.loops.written if prepared.original and prepared.loops else (),
        flops_note=note_of_loops(prepared.captured.original),
        devices=devices,
        tensors=name_values(program, range(len(program.avals))),
        loop_ops=loops,
        stacks={value: bytes_anywhere(program.avals[value]) for value in graph.host if graph.producer[value] in loops},
    )


def _name_of_loop(equation: Any, chunks: int) -> str:
    """What a loop is: over chunks of the batch, or the steps of a loop of the user's. Empty for what is no loop.

    A reverse loop may be inside a `jax.checkpoint`, with what it fetches beforehand, and be several loops there.
    """
    if equation.primitive is primitives.while_p:
        return "loop"
    if equation.primitive is primitives.scan_p:
        loops = [equation.params]
    else:
        loops = [one.params for one in compat.equations_in(equation.params) if one.primitive is primitives.scan_p]
    lengths = {loop["length"] for loop in loops}
    if lengths == {chunks}:
        return f"batch in {chunks} chunks"
    steps = f" of {min(lengths)} steps" if len(lengths) == 1 else ""
    return f"loop{steps}" + (" in reverse" if any(loop["reverse"] for loop in loops) else "") if loops else ""
