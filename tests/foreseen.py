"""Temporary bytes of small functions: what the compilers' models foresee, and what the compilers allocate."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat, reports_gaps_twice
from remat_opt.targets.devices import resolve_target


def foreseen(
    function: Callable,
    *avals: Any,
    target: str = "v5e",
    donated: Sequence[int] = (),
    gaps_twice: bool | None = None,
) -> int:
    """What a target's compiler is foreseen to allocate for a function of arrays, of which some are donated; gaps
    counted as the installed compiler does, if it is not said."""
    device = resolve_target(target)
    program = inline(jax.make_jaxpr(function)(*avals), with_barriers=True, keep_names=False)
    reused = tuple(at in donated for at in range(len(avals)))
    graph = compiled(program, Rates(device.bandwidth, device.flops), reused, platform=device.platform)
    gaps_twice = reports_gaps_twice(device.platform) if gaps_twice is None else gaps_twice
    return allocated_by(graph, device.platform, gaps_twice=gaps_twice)


def foreseen_and_compiled(
    function: Callable, *avals: Any, target: str = "v5e", donated: Sequence[int] = ()
) -> tuple[int, int]:
    """The same, and what it does allocate."""
    measured = measure_flat(lambda *args: jax.tree.leaves(function(*args)), avals, donated=donated, target=target)
    return foreseen(function, *avals, target=target, donated=donated), measured.temp_bytes
