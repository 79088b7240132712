"""Why there is nothing to gain: where the peak of a step is."""

from __future__ import annotations

from remat_opt.graph.build import Bridge
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.loops.pairs import reason_to_stay_out
from remat_opt.trace import compat

MOST_OF_THE_PEAK = 0.5  # the part of a step's peak from which on a loop's body is said to make it


def why_nothing_is_gained(bridge: Bridge) -> str:
    """What a user can do about a step that needs as much memory however it is written.

    Args:
        bridge: the original step, with its graph.
    """
    return _loop_left_at_the_peak(bridge) or (
        "if there is no gradient in it, give optimize the whole training step, with jax.grad and the update, not the "
        "loss alone"
    )


def _loop_left_at_the_peak(bridge: Bridge) -> str | None:
    """What is said of a peak in the body of a loop, branch or map that has to stay as it is; None for other peaks."""
    graph = bridge.graph
    before = simulate(graph, save_everything(graph))
    if before.peak_position >= len(graph.ops):  # at the return
        return None
    equation = bridge.program.equations[bridge.equation_of[before.peak_position]]
    if graph.ops[before.peak_position].workspace < MOST_OF_THE_PEAK * before.peak:
        return None
    reason = reason_to_stay_out(equation)
    return reason and (
        f"the peak is in a {equation.primitive.name} ({compat.line_of(equation.source_info)}) that is left as it is: "
        f"{reason}; put remat_opt.checkpoint round the function that is differentiated there"
    )
