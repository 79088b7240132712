"""`explain`: what is saved, what is recomputed, why, and what it costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from remat_opt.planner.decision import Decision
from remat_opt.report.findings import Findings
from remat_opt.report.notebook import to_html
from remat_opt.report.pictures import draw_live_memory, save
from remat_opt.report.text import to_text
from remat_opt.trace.flops import note_of_loops


@dataclasses.dataclass(frozen=True, eq=False)
class Explanation(Findings):
    """Prints as text; `.save("picture.png")` draws it. Its attributes are those of `Findings`."""

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(str(self), lambda: draw_live_memory(self))

    def save(self, path: str | Path) -> None:
        """Draw live memory over the step, before and after, into a file; its ending says which format.

        Raises:
            ImportError: matplotlib is not installed; the message says what to install.
        """
        save(draw_live_memory(self), path)


def explain(decision: Decision) -> Explanation:
    """Build the explanation of a decision."""
    prepared, solution = decision.prepared, decision.solution
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
        is_divided=prepared.is_divided,
    )
