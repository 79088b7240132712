"""Why there is nothing to gain: where the peak of a step is."""

from __future__ import annotations

from remat_opt.graph.build import Bridge
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.loops.pairs import reason_to_stay_out
from remat_opt.trace import compat

MOST_OF_THE_PEAK = 0.5  # the part of a step's peak from which on a loop's body is said to make it


def why_nothing_is_gained(bridge: Bridge) -> str:
    """What a user can do about a step, here the original one, that needs as much memory however it is written."""
    graph = bridge.graph
    before = simulate(graph, save_everything(graph))
    is_in_op = before.peak_position < len(graph.ops)  # else at the return
    if is_in_op and graph.ops[before.peak_position].workspace >= MOST_OF_THE_PEAK * before.peak:
        equation = bridge.program.equations[bridge.equation_of[before.peak_position]]
        if reason := reason_to_stay_out(equation):
            return (
                f"the peak is in a {equation.primitive.name} ({compat.line_of(equation.source_info)}) that is left as "
                f"it is: {reason}; put remat_opt.checkpoint round the function that is differentiated there"
            )
    return (
        "if there is no gradient in it, give optimize the whole training step, with jax.grad and the update, not the "
        "loss alone"
    )
