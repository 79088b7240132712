"""Plans the loops of a step and rewrites them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from remat_opt.emit.train_step import write
from remat_opt.graph.build import Bridge, build
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import minimum_possible
from remat_opt.loops.body import is_loop
from remat_opt.loops.choose import LoopChoices
from remat_opt.loops.inside import Body, rewrite_inside
from remat_opt.loops.recomputation import JointStep
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.loops.steps import Emit, StepCost, StepCosts
from remat_opt.search import SOLVERS, Problem, Solution, search_of
from remat_opt.trace.inline import Program
from remat_opt.trace.names import name_values
from remat_opt.trace.platforms import GPUS

SEGMENTS_THRESHOLD = 0.9  # of a body's peak; above, segments inside it are no gain


def write_loops(
    program: Program,
    loops: LoopChoices,
    aliases: Sequence[tuple[int, int]],
    rates: Rates,
    *,
    inside: float | None,
    keep_checkpoints: bool = False,
    platform: str = "",
    problems: dict[Any, Problem] | None = None,
    orders: bool = False,
) -> tuple[Program, LoopChoices]:
    """Write a program's loops as was chosen.

    Args:
        program: the flat step.
        loops: what was chosen for its pairs.
        aliases: (input, output) pairs of the program that share one buffer.
        rates: the target.
        inside: None leaves bodies of loops as they are. Else those with a forward/backward boundary get segments, for
            this share of what lies between their least and their plain peak.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
        platform: the target's.
        problems: of bodies that were searched before, with what was found; filled here.
        orders: write bodies in our order even where nothing is recomputed in them.

    Returns:
        The program, the same one where nothing was done, and the choices with the number of such bodies.
    """
    # Where gpt_scan (2 × 512 tokens) updates its weights in the reverse loop, the CPU's compiler needs 145 MB so and
    # 225 otherwise. GPUs and TPUs see what is overwritten when, and would hold the slices for nothing: 217 MB for 189
    # with 64 layers.
    program = rewrite_loops(
        program,
        loops.pairs,
        loops.chosen,
        aliases,
        separate_slices=platform == "cpu",
        steps=SearchedSteps(rates, platform, problems),
        rates=rates,
    )
    if inside is None:
        return program, loops
    share, donated = inside, {given for given, _ in aliases}

    def in_segments(body: Program, overwritten: tuple[bool, ...]) -> Body | None:
        # Written for the CPU, gradients summed over micro-batches took 30.0 MB there, and 25.3 so.
        written_for = platform if platform in GPUS else ""
        known = {} if problems is None else problems
        return body_in_segments(body, rates, overwritten, share, known, written_for, orders)

    program, bodies = rewrite_inside(
        program, rates, in_segments, pairs=loops.pairs, donated=donated, keep_checkpoints=keep_checkpoints
    )
    return program, dataclasses.replace(loops, inside=inside if bodies else None, bodies=bodies)


class SearchedSteps:
    """Schedules for the steps of reverse loops, by the search that schedules whole steps; a `StepSearch`.

    Steps with loops inside stay in their order, since these are pairs of their own, and so do those of arrays that are
    divided among devices, whose communication is counted on the step as it was read.

    Args:
        rates: the target.
        platform: the target's.
        problems: of steps that were searched before, with what was found; filled here.
    """

    def __init__(self, rates: Rates, platform: str, problems: dict[Any, Problem] | None = None):
        self.rates = rates
        self.platform = platform
        self.problems = {} if problems is None else problems

    def costs(self, step: JointStep) -> StepCosts:
        bridge, problem = self._read(step)
        plain = StepCost(problem.plain.peak, 0.0, 0.0)
        if not self._can_be_scheduled(step.program, bridge):
            return StepCosts((plain,), bridge.graph.flops, bridge.graph.seconds)
        found = [
            StepCost(one.peak, one.schedule.extra_flops(bridge.graph), one.extra_seconds)
            for one in _frontier(step, problem)
            if one.peak < plain.peak
        ]
        return StepCosts((*found, plain), bridge.graph.flops, bridge.graph.seconds)

    def written(self, step: JointStep, most_bytes: int) -> Emit | None:
        bridge, problem = self._read(step)
        if problem.plain.peak <= most_bytes or not self._can_be_scheduled(step.program, bridge):
            return None
        frontier = _frontier(step, problem)
        solution = next((one for one in reversed(frontier) if one.peak <= most_bytes), frontier[0])
        names = name_values(step.program, solution.choice.saved)
        return lambda operands: write(bridge, solution.schedule, names, operands, is_step_of_loop=True)

    def _read(self, step: JointStep) -> tuple[Bridge, Problem]:
        bridge = build(step.program, self.rates, step.overwritten, platform=self.platform)
        graph = dataclasses.replace(bridge.graph, held=step.held.intersection(bridge.graph.outputs))
        bridge = dataclasses.replace(bridge, graph=graph)
        return bridge, _problem_of(bridge.graph, self.problems)

    def _can_be_scheduled(self, program: Program, bridge: Bridge) -> bool:
        with_loops = any(is_loop(equation) for equation in program.equations)
        return bool(bridge.graph.ops) and not with_loops and program.marks is None


def _frontier(step: JointStep, problem: Problem) -> tuple[Solution, ...]:
    """The schedules of a step: of one that repeats all, which is in every pair, with more care."""
    return search_of(problem).frontier if step.recomputes_all else search_of(problem).short_frontier


def _problem_of(graph: Graph, known: dict[Any, Problem]) -> Problem:
    alike = (graph.sizes, graph.ops, graph.inputs, graph.outputs, graph.aliases, graph.constants, graph.held)
    return known.setdefault(alike, Problem(graph))


def body_in_segments(
    body: Program,
    rates: Rates,
    overwritten: tuple[bool, ...],
    share: float,
    problems: dict[Any, Problem],
    platform: str = "",
    orders: bool = False,
) -> Body | None:
    """A body that has a forward and a backward pass with a schedule of less memory; None where nothing is gained.

    Args:
        body: one step of a loop, a branch, or the program of one device.
        rates: the target.
        overwritten: for each input whether its buffer may be reused: the carry's may.
        share: of what lies between the least and the plain peak, how much it may need.
        problems: see `write_loops`; forms of a step differ in few of their bodies.
        platform: of the compiler that it is written for; empty where that does not matter.
        orders: give a body in our order where nothing is gained. XLA's own order may need much more: AlexNet in four
            chunks took 2016 MB on an H200, 1131 so.
    """
    bridge = build(body, rates, overwritten, platform=platform)
    if not bridge.graph.ops:
        return None
    graph = bridge.graph
    problem = _problem_of(graph, problems)
    solution = _searched(problem, share)
    if solution is None:
        if not orders:
            return None
        solution = problem.plain
    names = name_values(body, solution.choice.saved)
    seconds = graph.seconds + solution.extra_seconds
    return Body(lambda operands: write(bridge, solution.schedule, names, operands), solution.peak, seconds)


def _searched(problem: Problem, share: float) -> Solution | None:
    """A body's schedule for a share of the memory between its least and its plain peak; None where that is no gain."""
    if share == 1 or minimum_possible(problem.graph) > SEGMENTS_THRESHOLD * problem.plain.peak:
        return None
    solution = SOLVERS["auto"](problem, None)
    if share:
        solution = SOLVERS["auto"](problem, int(solution.peak + share * (problem.plain.peak - solution.peak)))
    if not solution.schedule.recomputed or solution.peak > SEGMENTS_THRESHOLD * problem.plain.peak:
        return None
    return solution
